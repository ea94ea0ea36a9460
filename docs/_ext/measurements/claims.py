"""Claims: sentences whose numbers a recording gives, and typed numbers.

The file of a page, ``tests/pages/<section>/<stem>.py``, may hold

    def CLAIMS(figure):
        forward = figure("layer-norm-forward", "H200")
        widths = forward.shares("triton")
        yield (
            f"On the H200 our kernel reaches {forward.share('triton', 4096)}% "
            f"of a copy at 4096 columns, and between {widths.least}% and "
            f"{widths.most}% over all widths"
        )

    FACTS = {f"all of them read {2**28 >> 20} MB": "the size of the tensor"}

A claim stands in the page word for word, wherever its lines end. It binds the
numbers that it computes from a figure, and no other. A fact is a piece of the
page whose numbers nothing measured, with its reason. A number with a unit
that neither covers is typed, and a test fails. ``tests/pages/site.py`` holds
the same for what is no page, and, as EVERYWHERE, facts of all texts.

Sizes in whole bytes and KB may be typed: code chooses those of tiles and
loads, and no recording has numbers in these units.
"""

import ast
import io
import itertools
import re
import tokenize
from bisect import bisect

import tutorial
from measurements.figure import (
    MARKED,
    ClaimError,
    figures,
    measured_in,
    unmarked,
)

SITE = "site"  # the name of the file of all that is no page

# What texts say --------------------------------------------------------------

DIGITS = r"\d[\d_]*(?:[.,]\d+)*"
WORDS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred"
BYTE = r"(?:[kKMGTP]?i?B|[a-z]*bytes?)"
# In any language of the site. A product, as 3 × 4, is no ratio.
ALWAYS = rf"""
    % | ‰ | percent | per\ cent
    | {BYTE} (?: /s | \ (?:per|a|each)\ second) | [kMGTP]?FLOPs? | [kMG]?bit/s
    | [MGTP]i?B\b | (?:mega|giga|tera)bytes?
    | [µμmnu]?s\b | (?:micro|milli|nano)?seconds?\b | min\b | minutes?\b
    | (?:マイクロ|ミリ|毫|微)?秒 | 分(?!の) | 倍(?![数率])
    | × (?! \s* (?: \d | [A-Za-z]\b | `` )) | x (?=\ [A-Za-z]{{2}}) | -?fold\b
    | times\ (?:as|faster|slower|quicker|longer|the\ (?:speed|time)|\w+'s)\b
"""
UNIT = re.compile(
    rf"""(?<![\w.,]) (?:
    ({DIGITS}) [*`]{{0,2}} [\s\xa0-]? ({ALWAYS})
    | ({DIGITS}) (x) \b
    | (\d+[.,]\d+) [\s\xa0-]? (times\b | {BYTE}\b)
    | ({WORDS}) \ (percent | times\ (?:as|faster|slower)\b)
    | (×) ({DIGITS})
    )""",
    re.VERBOSE,
)


def numbers(text):
    """(position, number, unit) of each number with a unit in a text."""
    for found in UNIT.finditer(text):
        number, unit = filter(None, found.groups())
        yield found.start(), number, unit


class Text:
    """Running words of a file, and the lines in which they stand."""

    def __init__(self, file, lines):
        self.file, words, self.starts, self.lines = file, [], [], []
        at = 0
        for line, said in lines:
            for word in said.split():
                words.append(word)
                self.starts.append(at)
                self.lines.append(line)
                at += len(word) + 1
        self.said = " ".join(words)

    def place(self, position):
        line = self.lines[bisect(self.starts, position) - 1]
        return f"{self.file.relative_to(tutorial.ROOT)}:{line}"

    def all(self, piece):
        """Where a piece stands, each time."""
        return [m.start() for m in re.finditer(re.escape(piece), self.said)]


def texts(file):
    """The texts of a file: of a script comments and strings, else all."""
    content = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return [Text(file, enumerate(content.splitlines(), start=1))]
    parts = itertools.chain(_comments(content), _strings(ast.parse(content)))
    return [Text(file, part) for part in parts]


def _comments(script):
    tokens = tokenize.generate_tokens(io.StringIO(script).readline)
    rows = {
        token.start[0]: token.string.lstrip("#")
        for token in tokens
        if token.type == tokenize.COMMENT
        and not token.string.startswith("# %%")
    }
    for _, block in itertools.groupby(
        enumerate(rows), lambda each: each[1] - each[0]
    ):
        yield [(row, rows[row]) for _, row in block]


def _strings(tree):
    """Each string, with ``{}`` where it computes something."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            said = "".join(
                part.value if isinstance(part, ast.Constant) else "{}"
                for part in node.values
            )
        elif isinstance(node, ast.FormattedValue):
            inside.add(id(node.format_spec))
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said = node.value
        else:
            continue
        if id(node) not in inside:
            yield list(enumerate(said.split("\n"), start=node.lineno))


def looks(file):
    """What the file of a page says of its kernels, in their panels."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "look":
            for part in _strings(node.value):
                yield Text(file, part)


def texts_of(name):
    """All texts of a page; or of the site, which are no page's."""
    if name != SITE:
        own = tutorial.file_of(name)
        kernels = looks(own) if own.exists() else []
        return [*texts(tutorial.script_of(name)), *kernels]
    files = (
        *tutorial.ROOT.glob("README*.md"),
        *(tutorial.ROOT / "docs").glob("*.rst"),
        *tutorial.TUTORIALS.rglob("*.rst"),
        tutorial.ROOT / "conf.py",
    )
    return [text for file in files if file.exists() for text in texts(file)]


# What is wrong ---------------------------------------------------------------


def names():
    """All that may have claims: the site and each page."""
    return [SITE, *map(tutorial.name_of, tutorial.scripts())]


def declared(name, what, otherwise):
    """CLAIMS or FACTS of a page's file."""
    if not tutorial.file_of(name).exists():
        return otherwise
    return getattr(tutorial.loaded(name), what, otherwise)


def claims(name):
    """The claims of a page, with marks around the numbers measured."""
    claim, made = None, declared(name, "CLAIMS", lambda figure: ())
    try:
        for claim in made(figures(name)):
            yield " ".join(claim.split())
    except Exception as error:
        why = str(error)
        if not isinstance(error, ClaimError):
            why = f"{type(error).__name__}: {error}"
        after = f", after {unmarked(claim)!r}" if claim else ""
        where = tutorial.file_of(name).relative_to(tutorial.ROOT)
        raise ClaimError(
            f"{where}: a claim cannot be computed{after}: {why}"
        ) from None


def wrong(name, said=None):
    """A sentence for each claim that its page does not make: what stands
    there, and what is right."""
    said = texts_of(name) if said is None else said
    bound = list(claims(name))
    all_right = set(map(unmarked, bound))
    for claim in bound:
        right = unmarked(claim)
        if any(right in text.said for text in said):
            continue
        parts = re.split(MARKED, claim)
        pattern = DIGITS.join(map(re.escape, parts))
        found = [
            (text, match)
            for text in said
            for match in re.finditer(pattern, text.said)
            if match[0] not in all_right
        ]
        for text, match in found:
            yield (
                f"{text.place(match.start())}: there stands {match[0]!r}, and "
                f"right is {right!r}"
            )
        if not found:
            where = tutorial.file_of(name).relative_to(tutorial.ROOT)
            yield (
                f"{where}: the claim {right!r} stands nowhere: write it, or "
                "take it out of CLAIMS"
            )


def all_wrong():
    """The same of all pages, and of the site; nothing stops it."""
    for name in names():
        try:
            yield from wrong(name)
        except ClaimError as error:
            yield str(error)
        except Exception as error:  # a file that cannot be read here
            where = tutorial.file_of(name).relative_to(tutorial.ROOT)
            yield f"{where} cannot be read: {type(error).__name__}: {error}"


def problems(name):
    """All that is wrong with the numbers of a page, a sentence each."""
    said = texts_of(name)
    try:
        bound = list(claims(name))
        yield from wrong(name, said)
    except ClaimError as error:
        yield str(error)
        return
    file = tutorial.file_of(name).relative_to(tutorial.ROOT)
    facts = declared(name, "FACTS", {})
    for fact in facts:
        if not any(fact in text.said for text in said):
            yield f"{file}: the fact {fact!r} stands nowhere: take it out"
    facts = [*facts, *everywhere()]
    for text in said:
        covered = set()
        for fact in facts:
            for at in text.all(fact):
                covered.update(range(at, at + len(fact)))
        for claim in bound:
            for at in text.all(unmarked(claim)):
                covered.update(at + i for i in measured_in(claim))
        for position, number, unit in numbers(text.said):
            if position not in covered:
                yield (
                    f"{text.place(position)}: {number} {unit} is typed: bind "
                    f"it in CLAIMS of {file}, or, if nothing has measured it, "
                    "declare it there in FACTS"
                )


def everywhere():
    """Facts of all texts."""
    return declared(SITE, "EVERYWHERE", {})
