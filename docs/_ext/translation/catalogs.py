"""Catalogs: what translators write, ``docs/locale/LANG/LC_MESSAGES/*.po``.

One for each page, and ``sphinx.po`` for the words of the site itself. Their
form is gettext's: a message that has changed is *fuzzy*, and counts as not
translated, until somebody has looked at it. Builds read what ``compile_all``
makes of them.
"""

import gettext
import shutil
from io import BytesIO

from babel.messages import mofile, pofile
from babel.messages.catalog import Catalog

import tutorial
from languages import CURRENT

LOCALE = tutorial.ROOT / "docs" / "locale"
COMPILED = tutorial.BUILD / "locale"
# Of the words of the site: Sphinx adds them to its own.
WORDS = "sphinx"


def path(code, name):
    """Where the catalog of a page is; a page is called as Sphinx does it."""
    return LOCALE / code / "LC_MESSAGES" / f"{name}.po"


def read(code, name):
    """The catalog of a page; an empty one if there is none."""
    file = path(code, name)
    if not file.exists():
        return Catalog()
    with file.open("rb") as stream:
        try:
            catalog = pofile.read_po(stream, abort_invalid=True)
        except pofile.PoFileError as error:
            place = file.relative_to(LOCALE.parents[1])
            raise SystemExit(f"{place} is no catalog: {error}") from None
    for message in catalog:  # Babel takes what was translated for a comment
        notes = message.user_comments
        before = [n for n in notes if n.startswith("|")]
        message.user_comments = [n for n in notes if n not in before]
        if before:
            lines = " ".join(note.removeprefix("|").strip() for note in before)
            quoted = lines.partition("msgid ")[2]
            message.previous_id = [pofile.denormalize(quoted)]
    return catalog


def done(message):
    """The translation of a message that is ready to be read, or None."""
    usable = message and message.string and not message.fuzzy
    return message.string if usable else None


def compile_all(code):
    """Write the catalogs of a language as gettext reads them."""
    shutil.rmtree(COMPILED / code, ignore_errors=True)
    written = LOCALE / code / "LC_MESSAGES"
    for file in written.rglob("*.po"):
        name = file.relative_to(written).with_suffix("")
        target = COMPILED / code / "LC_MESSAGES" / name.with_suffix(".mo")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            mofile.write_mo(stream, read(code, name.as_posix()))


class Untranslated(gettext.NullTranslations):
    """Says nothing of a message that has no translation."""

    def gettext(self, message):
        return ""


def translations(code, name):
    """A function that gives the translation of a page's message, or ""."""
    found = gettext.translation(name, COMPILED, [code], fallback=True)
    if isinstance(found, gettext.GNUTranslations):
        found.add_fallback(Untranslated())
        return found.gettext
    return Untranslated().gettext


def lookup(name, code=CURRENT.code):
    """A function that says a message of a page, in English at the worst."""
    say = translations(code, name)
    return lambda text: say(text) or text


def said(name, text):
    """A message of a page in the language of this build."""
    return lookup(name)(" ".join(text.split()))


def title(name):
    """The title of a tutorial, in the language of this build."""
    return said(tutorial.page_of(name), tutorial.title(name))


def summary(name, code=""):
    """Its summary; ``code`` stands where code begins and ends."""
    found = said(tutorial.page_of(name), tutorial.summary(name))
    return found.replace("``", code)


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
