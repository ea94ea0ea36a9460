"""What stands above all languages: the root of the site.

A front page that offers the languages, a page for addresses that lead
nowhere, which GitHub Pages shows at any depth, the map of all pages, for
assistants their list, and old addresses, which lead on.
"""

import os
import re
import shutil
from urllib.parse import urlsplit
from xml.sax.saxutils import escape, quoteattr

from jinja2 import Environment, FileSystemLoader

import tutorial
from languages import ENGLISH

DOCS = tutorial.ROOT / "docs"
SITE = tutorial.BUILD / "html"
ADDRESS = os.environ.get("SITE_URL", "http://localhost:8000/")
SITEMAP = "http://www.sitemaps.org/schemas/sitemap/0.9"
XHTML = "http://www.w3.org/1999/xhtml"
ARTICLE = re.compile(r'<article class="bd-article">(.*?)</article>', re.S)
# Of a copied part: what may stand on a page once, and links to it.
ANCHOR = re.compile(r'<a class="headerlink".*?</a>|(?<=<section) id="[^"]*"')


def write(languages, site):
    """Write the root of a site whose languages have been built."""
    templates = Environment(
        loader=FileSystemLoader(DOCS / "_templates"), autoescape=True
    )
    given = {
        "address": ADDRESS,
        "is_known": is_known(ADDRESS),
        "prefix": urlsplit(ADDRESS).path,
        "languages": languages,
        "english": ENGLISH,
    }
    made = {
        "index.html": templates.get_template("root.html").render(given),
        "404.html": not_found(
            {each: (site / each.folder / "404.html") for each in languages},
            templates.get_template("root-404.html").render(given),
        ),
        "sitemap.xml": sitemap(languages, pages(site / ENGLISH.folder)),
    }
    shutil.copytree(DOCS / "_extra", site, dirs_exist_ok=True)
    shutil.copy(site / ENGLISH.folder / "llms.txt", site)
    for name, text in made.items():
        (site / name).write_text(text, encoding="utf-8")


def is_known(address):
    """Whether this is an address of the site that others can reach."""
    return urlsplit(address).hostname != "localhost"


def pages(folder):
    """The pages of an edition; all editions have the same."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.html")
        if path.name != "404.html"
        and path.relative_to(folder).parts[0] not in ("_static", "pagefind")
    )


def address(language, page):
    """Where a page is published in a language."""
    page = re.sub(r"(^|/)index\.html$", r"\1", page)
    return f"{ADDRESS}{language.folder}/{page}"


def sitemap(languages, names):
    """All pages in all languages, each with the others."""
    lines = [
        f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="{SITEMAP}"'
        f' xmlns:xhtml="{XHTML}">\n'
    ]
    for name in names:
        others = "".join(
            f'<xhtml:link rel="alternate" hreflang="{each.tag}" '
            f"href={quoteattr(address(each, name))}/>"
            for each in languages
        )
        for each in languages:
            lines.append(
                f"<url><loc>{escape(address(each, name))}</loc>"
                f"{others}</url>\n"
            )
    return "".join([*lines, "</urlset>\n"])


def not_found(files, script):
    """The English page, with the words of the others below its own."""
    said = {
        language: ARTICLE.search(path.read_text("utf-8"))[1]
        for language, path in files.items()
    }
    page = files[ENGLISH].read_text("utf-8")
    page = page.replace(said[ENGLISH], absolute(ENGLISH, said[ENGLISH]), 1)
    words = "".join(
        f'<div lang="{language.tag}">'
        f"{absolute(language, ANCHOR.sub('', text))}</div>"
        for language, text in said.items()
        if language is not ENGLISH
    ).replace("h1>", "h2>")
    page = page.replace("</article>", f"{words}</article>", 1)
    return page.replace("</head>", f"{script}</head>", 1)


def absolute(language, text):
    """The links of a page that is shown at any depth."""
    front = f"{urlsplit(ADDRESS).path}{language.folder}/"
    return re.sub(r'href="(?![/#]|\w+:)', f'href="{front}', text)
