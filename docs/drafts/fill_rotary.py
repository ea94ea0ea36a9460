"""Write the recorded numbers into the prose of a page, in place of NN.

    python fill_rotary.py [repository] [page]

CLAIMS of the page's file in tests/pages gives each sentence; where the prose
has it with NN in place of its measured numbers, they are filled in. Paragraphs
that become too wide are wrapped anew. Prints claims that it did not find.
Ends with an error where an assertion in CLAIMS does not hold: then the prose
around it is not true of the numbers, and somebody must write.
"""

import re
import sys
import textwrap

ROOT = sys.argv[1] if len(sys.argv) > 1 else "."
NAME = sys.argv[2] if len(sys.argv) > 2 else "attention/04-rotary"
sys.path[:0] = [f"{ROOT}/docs/_ext", f"{ROOT}/tests"]

import tutorial
from measurements import figure

path = tutorial.script_of(NAME)
text = path.read_text("utf-8")


def flat(text):
    """The text in one line, and of each letter its place."""
    letters, places, space = [], [], True
    line_starts = {0} | {m.end() for m in re.finditer("\n", text)}
    i = 0
    while i < len(text):
        if i in line_starts and text[i] == "#":
            i += 1
            continue
        if text[i].isspace():
            if not space:
                letters.append(" ")
                places.append(i)
            space = True
        else:
            letters.append(text[i])
            places.append(i)
            space = False
        i += 1
    return "".join(letters), places


def wrapped(lines):
    """One paragraph of comments, wrapped at 79."""
    first = lines[0][2:]
    hang = "  " if first.startswith("- ") else ""
    body = " ".join(line[2:].strip() for line in lines)
    return textwrap.wrap(
        body, 79, initial_indent="# ", subsequent_indent="# " + hang,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


for claim in tutorial.loaded(NAME).CLAIMS(figure.figures(NAME)):
    numbers = re.findall(
        f"{figure.OPEN}(.*?){figure.CLOSE}", claim
    )
    pattern = " ".join(re.sub(figure.MARKED, "NN", claim).split())
    line, places = flat(text)
    start = line.find(pattern)
    if start < 0:
        print("not there with NN:", figure.unmarked(claim))
        continue
    edits = []
    for found, number in zip(re.finditer("NN", pattern), numbers):
        edits.append((places[start + found.start()], number))
    for at, number in reversed(edits):
        assert text[at : at + 2] == "NN"
        text = text[:at] + number + text[at + 2 :]

# Wrap what became too wide, from the line where its paragraph or item begins.
lines = text.split("\n")
i = 0
while i < len(lines):
    if len(lines[i]) > 79 and lines[i].startswith("# "):
        first, last = i, i
        while not lines[first].startswith("# - ") and re.match(
            r"# (?!- |\*\*)\S| *#   \S", lines[first - 1]
        ):
            first -= 1
        if lines[first - 1].startswith("# - ") and not lines[
            first
        ].startswith("# - "):
            first -= 1
        while re.match(r"# (?!- )\s*\S", lines[last + 1]):
            last += 1
        new = wrapped(lines[first : last + 1])
        lines[first : last + 1] = new
        i = first
    i += 1
path.write_text("\n".join(lines), encoding="utf-8")
left = len(re.findall(r"\bNN\b", "\n".join(lines)))
print(f"{path}: {left} NN left, {sum(len(x) > 79 for x in lines)} wide lines")
