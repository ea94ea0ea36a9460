"""One hash of a page's code: what was measured, and whether it has changed.

It covers the whole script, and the files beside it that the script names.
Left out is what changes no number: comments, docstrings, prose, blanks, and
the cells whose code begins with ``# Drawing:`` or ``# Solution``, which define
nothing that others use (a test holds that). What is left is also what runs
when a page is measured.

Tokens are compared, not syntax trees: their text is the same in all versions
of Python.
"""

import functools
import hashlib
import io
import re
import tokenize
from pathlib import Path

SEPARATOR = re.compile(r"# ?%%|#{20}")
LEFT_OUT = re.compile(r"# (?:Drawing:|Solution\b)")
PAGE = re.compile(r"\d\d-.*\.py|index\.rst|.*\.pyc")
STRING = re.compile(r"[rbu]*[\"']", re.IGNORECASE)  # and no f-string


def of(script):
    """The hash of a page's code, of 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, code in sorted(_covered(Path(script)).items()):
        found.update(f"{name}\n{code}\n".encode())
    return found.hexdigest()[:16]


def _covered(script):
    """{name: code} of a script, which has no name, and of what it names."""
    beside = {
        path.relative_to(script.parent): path
        for path in script.parent.rglob("*")
        if path.is_file() and not PAGE.fullmatch(path.name)
    }
    found, left = {}, {"": script}
    while left:
        name, path = left.popitem()
        found[name] = code = _code_of(path)
        for other, its_path in beside.items():
            module = other.parts[0].split(".")[0]  # or its package
            named = re.search(rf"\b{re.escape(module)}\b", code)
            if named and other.as_posix() not in found:
                left[other.as_posix()] = its_path
    return found


def _code_of(path):
    if path.suffix == ".py":
        return "\n".join(statements(path.read_text(encoding="utf-8")))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def measured(text):
    """A script without the cells that are left out; its lines stay."""
    lines = text.split("\n")
    for cell in cells(text):
        if left_out([lines[row - 1] for row in cell]):
            for row in cell:
                lines[row - 1] = ""
    return "\n".join(lines)


def cells(text):
    """The rows of each cell, from 1; the first has the head of the page."""
    starts = [
        token.start[0]
        for token in _tokens(text)
        if token.type == tokenize.COMMENT
        and token.start[1] == 0
        and SEPARATOR.match(token.string)
    ]
    ends = [*starts, len(text.split("\n")) + 1]
    return [range(*pair) for pair in zip([1, *starts], ends, strict=True)]


def left_out(cell):
    """Whether the code of a cell, behind its prose, begins as a drawing."""
    prose = True
    for line in cell:
        prose = prose and line.startswith("#")
        if line.strip() and not prose:
            return bool(LEFT_OUT.match(line))
    return False


@functools.lru_cache(maxsize=100)
def statements(text):
    """The logical lines that count: how deep each is, and its tokens."""
    found, depth, line = [], 0, []
    for token in _joined(measured(text)):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type == tokenize.NEWLINE:
            # Strings alone are a docstring, or nothing.
            if not all(STRING.match(each) for each in line):
                found.append(f"{depth} " + "\0".join(line))
            line = []
        elif token.type not in (tokenize.COMMENT, tokenize.NL):
            line.append(token.string)
    return found


def _tokens(text):
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def _joined(text):
    """The tokens with each f-string as one, as it was before Python 3.12."""
    lines, begun = text.splitlines(keepends=True), []
    for token in _tokens(text):
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "TSTRING_START"):
            begun.append(token.start)
        elif kind in ("FSTRING_END", "TSTRING_END"):
            (first, start), (last, end) = begun.pop(), token.end
            rows = lines[first - 1 : last]
            rows[-1] = rows[-1][:end]
            rows[0] = rows[0][start:]
            token = token._replace(type=tokenize.STRING, string="".join(rows))
        if not begun:
            yield token
