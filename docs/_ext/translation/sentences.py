"""Sentences, also where no space is between two of them."""

import re

ENDS = ".?!。？！"
WIDE = "。？！：；，、"  # signs that hold the space behind them
BETWEEN = re.compile(r"(?<=[.?!])\s+(?=\S)|(?<=[。？！])\s*(?=\S)")


def split(text):
    return BETWEEN.split(text)


def joined(sentences, by=" "):
    """Sentences in a text, with a space behind one that needs it."""
    text = ""
    for sentence in filter(None, sentences):
        glue = by if text and text[-1] not in WIDE else ""
        text += glue + sentence
    return text
