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
from fractions import Fraction

from measurements import claims
from translation.catalogs import LOCALE

LITERAL = re.compile(r"``.+?``")
ROLE = re.compile(r":([\w-]+):`([^`]*)`")
LINK = re.compile(r"`[^`<]*<([^`>]+)>`_|`([^`<>]+)`_")
# What has a name keeps it: what is elsewhere, and a library.
NAMED = re.compile(r"`[^`<]*<https?:[^`>]+>`_|Cut Cross-Entropy")
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
            if what == "number" and in_myriads(part, source, said):
                continue
            yield f"{what} {part} is missing"
        if what != "number":
            for part in parts(said).keys() - parts(source).keys():
                yield f"{what} {part} is not in the source"
    for part in typed(source, said):
        yield f"{part}: only the translation says so"
    if plain(said).count("`"):
        yield "markup is broken: a ` is left"
    if len(BOLD.findall(source)) != len(BOLD.findall(said)):
        yield "what is bold is not that of the source"
    if found := re.search(r"[*`_][（「『“]", said):
        yield f"no markup ends before an opening bracket: {found[0]}"


POWERS = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
MYRIADS = re.compile(r"(?:([\d.,]*\d) ?[亿億] ?)?(?:([\d.,]*\d) ?万)?")


def in_myriads(number, source, said):
    """Whether the 33 of 33 million is the 3300 of 3300 万."""
    powers = re.findall(rf"(?<![\d.,]){number} ({'|'.join(POWERS)})", source)
    values = {_value(number) * POWERS[power] for power in powers}
    return not values.isdisjoint(
        _value(most) * 10**8 + _value(least) * 10**4
        for most, least in MYRIADS.findall(said)
    )


def _value(number):
    return Fraction(number.replace(",", "") or 0)


# Words of numbers: English ones, and those that stand before 倍.
VALUES = {word: str(i) for i, word in enumerate(claims.WORDS.split("|"), 2)}
VALUES |= {"twice": "2", "double": "2", "hundred": "100", "half": "0.5"}
CJK_VALUES = {sign: str(i) for i, sign in enumerate("一二三四五六七八九十", 1)}
CJK_VALUES |= {"两": "2", "一": "2"}  # 一倍 more is twice as much
UNITS = {
    "µs": ("us", "μs", "微秒", "マイクロ秒", "microsecond"),
    "ms": ("毫秒", "ミリ秒", "millisecond"),
    "s": ("秒", "second"),
    "min": ("分", "minute"),
    "%": ("percent", "per cent"),
}


def typed(source, said):
    """Numbers with a unit that a translation has and its message has not."""
    source, said = plain(source), plain(said)
    words = re.findall(r"[a-z]+", source.lower())
    alone = {n.replace(",", "") for n in NUMBER.findall(source)}
    alone |= {VALUES[word] for word in words if word in VALUES}
    pairs = {_measure(*each) for each in claims.numbers(source)}
    for at, number, unit in claims.numbers(said):
        value, its_unit = _measure(at, number, unit)
        if value == "1" and its_unit in ("s", "min", "倍"):
            continue  # 1 秒あたり is a second, 1 倍半 half as much again
        fine = value in alone if unit == "倍" else (value, its_unit) in pairs
        if not fine:
            yield f"{number} {unit}"
    for sign in re.findall(r"([一二三四五六七八九十两])倍(?![数率])", said):
        if CJK_VALUES[sign] not in alone:
            yield f"{sign}倍"


def _measure(_at, number, unit):
    unit = unit.removesuffix("s") if len(unit) > 2 else unit
    same = (kind for kind, others in UNITS.items() if unit in others)
    value = VALUES.get(number, number.replace(",", ""))
    return value, next(same, unit)


def style(source, said, code):
    """Signs, spaces and terms that a language has otherwise."""
    if found := re.search(r"[。，、：；（] | [。，、：；）]", said):
        yield f"a space beside a full-width sign: {found[0]}"
    bare = re.sub(r"[*\\]", "", plain(said, "X"))
    for pattern, problem in STYLE[code].items():
        if found := re.search(pattern, bare):
            yield f"{problem}: {found[0]}"
    text = plain(NAMED.sub(" ", PLACEHOLDER.sub(" ", source)))
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
    bare = re.sub(r"\d[\d.,]* ?[万亿億]", " ", plain(text))  # see in_myriads
    return Counter(NUMBER.findall(bare))


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


def term_of(pattern):
    """The term of a pattern of the glossary."""
    return re.sub(r"\\(.)", r"\1", pattern.removesuffix("(?:e?s)?"))


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
