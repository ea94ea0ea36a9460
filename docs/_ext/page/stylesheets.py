"""The rules of stylesheets that are for something on a page.

A reader without JavaScript has ``data-theme="auto"``: what the light and the
dark theme say also holds there, by the reader's system.
"""

import hashlib
import itertools
import re

import tinycss2
from sphinx.errors import ExtensionError

# A class that a script puts together from parts.
MADE = {"bs-tooltip-auto"}
# Scripts without classes: words of the pages, or of a language.
DATA = ("searchindex.js", "language_data.js", "english-stemmer.js")
NAMES = re.compile(r'\b(?:class|id)="([^"]+)"')
BEGUN = re.compile(r"(\w+-[\w-]*)\$\{")  # in a script: the rest is a number
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
IMPORT = re.compile(r'@import "([^"]+)";')
# Two thirds of the theme's rules: a letter of the icon font.
GLYPH = re.compile(r"(?<=\})[^{}@]*\{--fa:[^{}]*\}")
# A stylesheet may load the font that page/formulas.py writes beside it.
LOADS = re.compile(r"url\((?![\"']?(data:|#|formulas\.woff))[^)]*\)")
THEMES = {
    "light": "@media not (prefers-color-scheme:dark)",
    "dark": "@media (prefers-color-scheme:dark)",
}


class Words(set):
    """Names that are there, and how others begin."""

    def __init__(self):
        super().__init__(MADE)
        self.begun = ()

    def has(self, names):
        return all(
            name in self or name.startswith(self.begun) for name in names
        )


def words(static, texts):
    """What may be the class or the id of an element."""
    known, begun = Words(), set()
    for text in texts:
        known.update(*map(str.split, NAMES.findall(text)))
    for path in static.rglob("*.js"):
        if path.name not in DATA:
            text = path.read_text("utf-8")
            known.update(re.findall(r"[\w-]+", text))
            begun.update(BEGUN.findall(text))
    known.begun = tuple(begun)
    return known


def key(texts, known):
    """What the needed rules of stylesheets depend on, as a hash."""
    parts = repr([texts, sorted(known), sorted(known.begun)])
    return hashlib.sha256(parts.encode()).hexdigest()


def needed(name, text, known):
    """What a stylesheet says of classes and ids that are there."""
    text = kept(tinycss2.parse_stylesheet(text, True, True), known)
    if found := LOADS.search(text):
        raise ExtensionError(f"{name} loads {found[0]}: give its data")
    return text


def whole(path):
    """A stylesheet with those that it imports."""
    css = GLYPH.sub("", COMMENT.sub("", path.read_text("utf-8")))
    return IMPORT.sub(lambda found: whole(path.parent / found[1]), css)


def kept(rules, known):
    return "".join(
        style(rule, known)
        if rule.type == "qualified-rule"
        else at(rule, known)
        for rule in rules
    )


def at(rule, known):
    if rule.at_keyword == "font-face" and "Awesome" in rule.serialize():
        return ""  # site.css draws the icons
    if rule.at_keyword not in ("media", "supports"):
        return rule.serialize() + "\n"
    text = kept(tinycss2.parse_rule_list(rule.content, True, True), known)
    head = tinycss2.serialize(rule.prelude).strip()
    return text and f"@{rule.at_keyword} {head}{{\n{text}}}\n"


def style(rule, known):
    selectors = [
        tinycss2.serialize(selector).strip()
        for selector in split(rule.prelude)
        if known.has(needs(selector))
    ]
    body = "{" + tinycss2.serialize(rule.content).strip() + "}\n"
    text = selectors and ",".join(selectors) + body
    for theme, media in THEMES.items():  # without a script
        of_theme = re.compile(rf'\[data-theme="?{theme}"?\]')
        auto = [
            of_theme.sub("[data-theme=auto]", selector)
            for selector in selectors
            if of_theme.search(selector)
        ]
        if auto:
            text += media + "{" + ",".join(auto) + body + "}\n"
    return text or ""


def split(prelude):
    """The selectors between the commas."""
    selectors = [[]]
    for token in prelude:
        if token.type == "literal" and token.value == ",":
            selectors.append([])
        else:
            selectors[-1].append(token)
    return selectors


def needs(selector):
    """The classes and ids that an element must have, itself or around it."""
    names = {token.value for token in selector if token.type == "hash"}
    for dot, name in itertools.pairwise(selector):
        if dot.type == "literal" and dot.value == "." and name.type == "ident":
            names.add(name.value)
    return names
