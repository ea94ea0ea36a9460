"""Words that are said later, in the language of the page that shows them.

Sphinx's ``_`` says a word at once. What is made for all languages, before
there is a page, says nothing yet: a word is marked with ``N_``, and ``Said``
has a sentence and what is put into it. To all but a page it is English.
"""

import re
from dataclasses import dataclass, field
from functools import reduce


def N_(text):  # noqa: N802 (what gettext calls it)
    """Mark a word for the catalogs; ``_`` says it where it is shown."""
    return text


@dataclass(frozen=True)
class Said:
    text: str
    values: dict = field(default_factory=dict)

    def __str__(self):
        return said(self, str)


def said(value, translate):
    """A value in a language; only what is Said has words."""
    if not isinstance(value, Said):
        return str(value)
    values = {name: said(v, translate) for name, v in value.values.items()}
    return translate(value.text) % values


def in_words(text):
    """Whether a unit or a name is English words: GB/s, N and dk are not."""
    return bool(re.search(r"[a-z]{3}| of ", text))


def named(text, translate):
    """A unit, or what an axis is called, in a language."""
    return translate(text) if in_words(text) else text


COMMA = N_("%(some)s, %(last)s")
SEMICOLON = N_("%(some)s; %(last)s")
AND = N_("%(some)s and %(last)s")


def listed(parts, how=COMMA):
    """Parts one after the other; None if there is none."""

    def with_next(some, last):
        return Said(how, {"some": some, "last": last})

    return reduce(with_next, parts) if parts else None


def in_a_row(parts, translate):
    """Parts with commas between them, as a language writes them."""
    return said(listed([*parts]) or "", translate)
