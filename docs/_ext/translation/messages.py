"""A script, or a cell of one, with other words.

A message is a heading, a paragraph or an item of the prose, a comment, or a
paragraph of a docstring. Its lines are joined by spaces, as gettext joins
them. All else in a script is code, formulas and printed text, and stays.
"""

import ast
import io
import re
import tokenize

from translation.lines import columns, one, wrapped

WIDTH = 79
# For tools, not for people.
SILENT = re.compile(r"#\s*(fmt:|noqa|type:|sphinx_gallery_|!)")
UNDERLINE = re.compile(r"([=\-~^])\1\1+")
# A number of three digits ends a sentence; it begins no item.
ITEM = re.compile(r"(?:[*-]|\d{1,2}\.) +")


def messages(script):
    """The messages of a script, in its order; some stand there twice."""
    found = []  # (line, text)

    def note(text, line):
        found.append((line, text))
        return text

    _replaced(script, note, WIDTH)
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def translated(script, say, width=WIDTH):
    """A script with say(message) in place of each message; its prose in
    lines of a width."""
    return _replaced(script, lambda text, line: say(text), width)


def _docstring(node):
    first = node.body[0] if node.body else None  # a cell of comments has none
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first if isinstance(first.value.value, str) else None
    return None


def _documented(tree):
    """Functions and classes with a docstring."""
    kinds = ast.FunctionDef, ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and _docstring(node):
            yield node


def _replaced(script, word, width):
    """The script with word(text, line) in place of each message."""
    lines = script.split("\n")
    edits = []  # (first line, line behind the last, new lines)
    tree = ast.parse(script)
    prose = set()  # the lines of text blocks
    if found := _docstring(tree):
        start, end = found.lineno, found.end_lineno - 1
        new = _text(lines[start:end], word, start + 1, width)
        edits.append((start, end, new))
        prose.update(range(found.lineno - 1, found.end_lineno))
    for start, end in _blocks(lines):
        text = [line[2:] for line in lines[start:end]]
        new = _text(text, word, start + 1, width)
        new = [f"# {line}".rstrip() for line in new]
        edits.append((start, end, new))
        prose.update(range(start, end))
    for node in _documented(tree):
        string = _docstring(node)
        start, end = string.lineno - 1, string.end_lineno
        edits.append((start, end, _documentation(lines[start:end], word,
                                                 start)))  # fmt: skip
        prose.update(range(start, end))
    edits += _comments(script, lines, prose, word)
    for start, end, new in sorted(edits, reverse=True):
        lines[start:end] = new
    return "\n".join(lines)


def _blocks(lines):
    """Where the lines of each text block are, behind its ``# %%``."""
    for i, line in enumerate(lines):
        if line.startswith("# %%"):
            end = i + 1
            while end < len(lines) and lines[end].startswith("#"):
                end += 1
            if end > i + 1:
                yield i + 1, end


def _text(lines, word, at, width):
    """reStructuredText with other words; the number of its first line."""
    out, i = [], 0
    while i < len(lines):
        line = lines[i]
        indent = len(line) - len(line.lstrip())
        end = i + 1
        if not line.strip():
            out.append(line)
        elif line.lstrip().startswith(".. "):
            while end < len(lines) and (
                not lines[end].strip() or lines[end].startswith(" " * 3)
            ):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            out += lines[i:end]
        elif end < len(lines) and UNDERLINE.fullmatch(lines[end].strip()):
            title = word(line.strip(), at + i)
            out += [title, lines[end][0] * max(columns(title), 3)]
            end += 1
        else:
            item = ITEM.match(line.lstrip())
            hang = indent + (len(item[0]) if item else 0)
            while end < len(lines) and _goes_on(lines[end], hang, item):
                end += 1
            first = line.strip()[len(item[0]) if item else 0 :]
            text = one([first, *lines[i + 1 : end]])
            new = word(text, at + i)
            begin = " " * indent + (item[0] if item else "")
            out += wrapped(new, width - 2, begin, " " * hang)
        i = end
    return out


def _goes_on(line, hang, item):
    """Whether a line belongs to the paragraph above."""
    if not line.strip():
        return False
    indent = len(line) - len(line.lstrip())
    if item:
        return indent >= hang
    return not ITEM.match(line.lstrip()) or indent != hang


def _documentation(lines, word, start):
    """A docstring with other words."""
    indent = re.match(r" *", lines[0])[0]
    opening = re.match(r' *[rR]?("""|\'\'\'|"|\')', lines[0])
    quotes = opening[1]
    text = "\n".join(lines)[opening.end() :].removesuffix(quotes)
    out, row = [], start + 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip():
            said = one(paragraph.strip().split("\n"))
            new = word(said, row)
            begin = indent if out else opening[0]
            out += wrapped(new, WIDTH - len(quotes), begin, indent)
        else:
            out += [""]
        row += paragraph.count("\n")
    while out and not out[-1]:
        out.pop()
    if "\n" in text and not text.rpartition("\n")[2].strip():
        out.append(indent + quotes)
    else:
        out[-1] += quotes
    return out


def _comments(script, lines, prose, word):
    """Edits of comments: those in lines of their own, and behind code."""
    groups = []  # [first row, last row, column, is behind code, texts]
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        row, column = token.start
        if (
            token.type != tokenize.COMMENT
            or row - 1 in prose
            or token.string.startswith("# %%")
        ):
            continue
        behind = bool(lines[row - 1][:column].strip())
        text = token.string.lstrip("#").strip()
        last = groups[-1] if groups else None
        if SILENT.match(token.string) or not text:
            groups.append([row, row, -1, behind, []])
        elif last and not behind and last[1:3] == [row - 1, column]:
            last[1] = row
            last[4].append(text)
        else:
            groups.append([row, row, column, behind, [text]])
    for first, last, column, behind, texts in groups:
        if not texts:
            continue
        text, tool = one(texts), ""
        if behind and (found := re.search(r"\s+# (fmt|noqa).*$", text)):
            text, tool = text[: found.start()], found[0]
        new = word(text, first)
        begin = lines[first - 1][:column] + "# "
        rest = " " * column + "# "
        out = wrapped(new, WIDTH - len(tool), begin, rest)
        out[0] += tool
        yield first - 1, last, out
