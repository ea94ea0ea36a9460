"""Sentences, also where no space is between two of them."""

import re

from languages import CURRENT, ENGLISH

ENDS = ".?!。？！"
WIDE = "。？！：；，、"  # signs that hold the space behind them
BETWEEN = re.compile(r"(?<=[.?!])\s+(?=\S)|(?<=[。？！])\s*(?=\S)")


def split(text):
    return BETWEEN.split(text)


def ended(text):
    """A text as a sentence of the language that is built."""
    return text + ("." if CURRENT is ENGLISH else "。")


def joined(sentences, by=" "):
    """Sentences in a text, with a space behind one that needs it."""
    text = ""
    for sentence in filter(None, sentences):
        glue = by if text and text[-1] not in WIDE else ""
        text += glue + sentence
    return text
