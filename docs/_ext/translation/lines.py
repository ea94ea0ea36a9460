"""Lines of text in which wide characters stand.

A line ends at a space, or behind a full-width sign, where no space is:
``joined`` takes such a line's end out again.
"""

import re
import unicodedata

# After these a line may end, though no space follows.
ENDS = "。，、；：？！」』）…"
WIDE = r"[\u2e80-\u303f\u3041-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff01-\uff60]"
UNITS = r"[KMGT]?B(?:/s)?|TFLOP/s|[mµ]?s"
END = re.compile(rf"(?<=[{ENDS}])\n[ \t]*")


def wide(text):
    """Whether a wide character is in a text."""
    return bool(re.search(WIDE, text))


def columns(text):
    """Columns that a text takes: a wide character takes two."""
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrapped(text, width, first="", rest=""):
    """The lines of a text, each behind what begins it."""
    lines, line = [], first
    for piece, space in _pieces(text):
        begun = line != (rest if lines else first)
        glue = space if begun else ""
        if begun and columns(line + glue + piece) > width:
            lines.append(line)
            line, glue = rest, ""
        line += glue + piece
    return [*lines, line]


def _pieces(text):
    """What no line's end may part, each with the space before it."""
    space = ""
    for word in _words(text):
        for piece in re.split(rf"(?<=[{ENDS}])(?![{ENDS}])(?=\S)", word):
            yield piece, space
            space = ""
        space = " "


def _words(text):
    """The words between spaces; what is marked up stays in one.

    The number that ends a sentence stays with the word before it: a line that
    begins with "128. " would be an item of a list.
    """
    marked = r"(?:``.*?``|:math:`[^`]*`|`[^`]*`_|[^\s`]|`)+"
    return re.findall(rf"{marked}(?: \d+\.(?= ))?", text)


def one(parts):
    """The line that was wrapped into these."""
    return joined("\n".join(map(str.strip, parts))).replace("\n", " ")


def joined(text):
    """A paragraph without the ends of lines that ``wrapped`` has put where no
    space was."""
    return END.sub("", text)


def tight(text):
    """A text whose lines were joined by spaces, without those that no space
    was."""
    return re.sub(rf"(?<=[{ENDS}])\s+", "", text)


def counted(text):
    """A text in which no line ends between a number and what it counts: a
    wide character, percent, or a unit."""
    counts = rf"{WIDE}|%|(?:{UNITS})(?![A-Za-z])"
    return re.sub(rf"(?<=\d)\s(?={counts})", "\N{NO-BREAK SPACE}", text)


def close(text):
    """A text without the spaces between wide characters, which a message had
    around a name that is one."""
    return re.sub(rf"(?<={WIDE})\s(?={WIDE})", "", text)
