"""Catalogs: what translators write, ``docs/locale/LANG/LC_MESSAGES/*.po``.

One for each page, and ``sphinx.po`` for the words of the site itself. Their
form is gettext's: a message that has changed is *fuzzy*, with the one that was
translated beside it, until somebody has looked at it.
"""

import difflib
import functools
from io import BytesIO

from babel.messages import pofile
from babel.messages.catalog import Catalog

import tutorial
from languages import ENGLISH

LOCALE = tutorial.ROOT / "docs" / "locale"
ALIKE = 0.6  # of a message and the one that it replaces
# Of the words of the site: Sphinx adds them to its own.
WORDS = "sphinx"


def path(code, name):
    """Where the catalog of a page is; a page is called as Sphinx does it."""
    return LOCALE / code / "LC_MESSAGES" / f"{name}.po"


def read(code, name):
    """The catalog of a page; an empty one if there is none."""
    return of_file(path(code, name))


@functools.cache
def of_file(file):
    if not file.exists():
        return Catalog()
    with file.open("rb") as stream:
        catalog = pofile.read_po(stream, abort_invalid=True)
    for message in catalog:  # Babel takes what was translated for a comment
        notes = message.user_comments
        before = [n for n in notes if n.startswith("|")]
        message.user_comments = [n for n in notes if n not in before]
        if before:
            quoted = before[0].partition("msgid ")[2]
            message.previous_id = [pofile.denormalize(quoted)]
    return catalog


def lookup(code, name):
    """What says a message of a page in a language, or leaves it as it is."""
    if code == ENGLISH.code:
        return lambda text: text
    catalog = read(code, name)
    return lambda text: done(catalog.get(text)) or text


def pages():
    """The pages that are no tutorials, as Sphinx calls them."""
    found = [path.stem for path in tutorial.ROOT.glob("docs/*.rst")]
    for path in tutorial.TUTORIALS.rglob("index.rst"):
        found.append(f"tutorials/{tutorial.name_of(path)}")
    return sorted(found)


def done(message):
    """The translation of a message that is ready to be read, or None."""
    usable = message and message.string and not message.fuzzy
    return message.string if usable else None


def refreshed(old, wanted, memory):
    """A catalog with the wanted messages, (text, note), in their order.

    What is translated stays, here or in memory: {text: translation}. A new
    message takes the translation of one that has gone and was much like it,
    as a fuzzy one.
    """
    new = Catalog()
    texts = [text for text, _ in wanted]
    gone = [m.id for m in old if m.id and m.string and m.id not in texts]
    for text, note in wanted:
        known = old.get(text)
        if known and known.string and (not known.fuzzy or text not in memory):
            found = (known.string, known.flags, known.previous_id)
        elif text in memory:
            found = (memory[text], (), ())
        elif near := difflib.get_close_matches(text, gone, 1, ALIKE):
            gone.remove(near[0])
            found = (old[near[0]].string, ("fuzzy",), (near[0],))
        else:
            found = ("", (), ())
        string, flags, before = found
        said = known.user_comments if known else ()
        new.add(
            text,
            string,
            flags=flags,
            previous_id=before,
            auto_comments=[note] * bool(note),
            user_comments=said,
        )
    return new


def text_of(catalog, code):
    """A catalog as its file says it: a paragraph in a line, no dates."""
    stream = BytesIO()
    pofile.write_po(stream, catalog, width=0, omit_header=True,
                    include_previous=True)  # fmt: skip
    head = (
        'msgid ""\nmsgstr ""\n'
        f'"Language: {code}\\n"\n'
        '"Content-Type: text/plain; charset=utf-8\\n"\n'
        '"Content-Transfer-Encoding: 8bit\\n"\n\n'
    )
    return head + stream.getvalue().decode().strip("\n") + "\n"
