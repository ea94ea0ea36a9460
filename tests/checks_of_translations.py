"""What a translation must have of its message.

``problems`` names what is missing or broken: code, numbers, links, markup.
``style`` names what is said otherwise than all of the site says it. What only
a reader can judge is not asked here.
"""

import ast
import csv
import functools
import re
from collections import Counter

from translation.catalogs import LOCALE

LITERAL = re.compile(r"``.+?``")
ROLE = re.compile(r":([\w-]+):`([^`]*)`")
LINK = re.compile(r"`[^`<]*<([^`>]+)>`_|`([^`<>]+)`_")
PUBLIC = re.compile(r"`[^`<]*<https?:[^`>]+>`_")
TARGET = re.compile(r"^(?:.*<)?([^<>]+)>?$", re.S)
BOLD = re.compile(r"(?<!\w)\*\*(?=\S).+?(?<=\S)\*\*(?!\w)")
NUMBER = re.compile(r"(?<![\w.])\d[\d_]*(?:[.,]\d+)*")
PLACEHOLDER = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w+\}")
CJK = r"[\u3041-\u30ff\u3400-\u9fff]"
# Signs that belong to letters of the other kind, and missing spaces.
STYLE = {
    "zh_CN": {
        rf"{CJK} ?[,;:!?](?!\S*`)": "a half-width sign",
        rf"{CJK}\.(?!\w)": "a half-width period",
        rf"{CJK}[A-Za-z0-9`]": "no space before Latin letters or digits",
        rf"[A-Za-z0-9`]{CJK}": "no space behind Latin letters or digits",
    },
    "ja": {
        rf"{CJK} ?[,;!?]": "a half-width sign",
        rf"{CJK}\.(?!\w)": "a half-width period",
        rf"{CJK}[`]": "no space before markup",
        rf"[`_]{CJK}": "no space behind markup",
    },
}


def problems(source, said):
    """What a translation lacks; a sentence each."""
    if "\n" in said:
        yield "a line ends within it"
    if said != said.strip():
        yield "a space at an end"
    for what, parts in (
        ("literal", literals),
        ("formula, role", roles),
        ("link", links),
        ("number", numbers),
        ("placeholder", placeholders),
    ):
        for part in (parts(source) - parts(said)).elements():
            yield f"{what} {part} is missing"
        if what != "number":
            for part in parts(said).keys() - parts(source).keys():
                yield f"{what} {part} is not in the source"
    if plain(said).count("`"):
        yield "markup is broken: a ` is left"
    if len(BOLD.findall(source)) != len(BOLD.findall(said)):
        yield "what is bold is not that of the source"
    if found := re.search(r"[*`_][（「『“]", said):
        yield f"no markup ends before an opening bracket: {found[0]}"


def style(source, said, code):
    """Signs, spaces and terms that a language has otherwise."""
    if found := re.search(r"[。，、：；（] | [。，、：；）]", said):
        yield f"a space beside a full-width sign: {found[0]}"
    bare = re.sub(r"[*\\]", "", plain(said, "X"))
    for pattern, problem in STYLE[code].items():
        if found := re.search(pattern, bare):
            yield f"{problem}: {found[0]}"
    # What has a name keeps it.
    text = plain(PUBLIC.sub(" ", PLACEHOLDER.sub(" ", source)))
    for term, translations in glossary(code):
        named = re.search(rf"(?<![\w-]){term}(?![\w(-])", text, re.I)
        if named and not any(each in said for each in translations):
            yield f"{named[0]} is {' or '.join(translations)}: glossary.csv"


def literals(text):
    return Counter(LITERAL.findall(text))


def without_literals(text):
    return LITERAL.sub(" ", text)


def roles(text):
    """Roles by what they name: a formula, or the target of a link."""
    return Counter(
        f":{role}:`{content if role == 'math' else TARGET.match(content)[1]}`"
        for role, content in ROLE.findall(without_literals(text))
    )


def links(text):
    text = ROLE.sub(" ", without_literals(text))
    return Counter(address or name for address, name in LINK.findall(text))


def numbers(text):
    return Counter(NUMBER.findall(plain(text)))


def placeholders(text):
    return Counter(PLACEHOLDER.findall(text))


def plain(text, instead=" "):
    """A text without what is marked up; the words of links stay."""
    text = LITERAL.sub(instead, text)
    text = re.sub(r":math:`[^`]*`", instead, text)
    text = re.sub(r":[\w-]+:`([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", text)
    return re.sub(r"`([^`<]*?)\s*(?:<[^`>]*>)?`_", r"\1", text)


@functools.cache
def glossary(code):
    """Terms as patterns, and how a language may say each."""
    file = LOCALE / "glossary.csv"
    if not file.exists():
        return []
    column = {"zh_CN": "中文", "ja": "日本語"}[code]
    with file.open(encoding="utf-8", newline="") as stream:
        return [
            (
                re.escape(row["English"]) + "(?:e?s)?",
                [each.strip() for each in row[column].split(" / ")]
                + [row["English"]] * ("of that name stays" in row["note"]),
            )
            for row in csv.DictReader(stream)
            if "unchecked" not in row["note"]
        ]


def same_code(one, other):
    """Whether two scripts differ in comments and docstrings only."""
    return _bare(one) == _bare(other)


def _bare(script):
    tree = ast.parse(script)
    kinds = ast.Module, ast.FunctionDef, ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)
