"""Refresh the catalogs: ``make translations``.

What is translated stays. A changed message becomes fuzzy, with the old one
beside it. What stands on several pages is translated once.
"""

import sys
from pathlib import Path

import joblib

import tutorial
from languages import TRANSLATED
from translation import catalogs, lines, messages, pages, words

# What messages depend on beside the script.
MADE_BY = (
    *(Path(each.__file__).read_text("utf-8") for each in (lines, messages)),
    sys.version_info[:2],
)


def wanted():
    """{catalog: {message: note}} of all that the site says in English."""
    return of_words() | of_pages() | of_tutorials()


def of_words():
    """The words of the mechanism."""
    return {catalogs.WORDS: {t: note for t, note, _ in words.messages()}}


def of_pages():
    """All pages that are no tutorials, as the English build has read them."""
    return {
        name: dict.fromkeys(pages.messages(name), "")
        for name in catalogs.pages()
    }


def of_tutorials():
    found = {}
    for script in tutorial.scripts():
        name = tutorial.name_of(script)
        said = _kept(script.read_text(encoding="utf-8"), MADE_BY)
        page = found[f"tutorials/{name}"] = {}
        for message in said:
            page.setdefault(message.text, message.kind)
        for text in words.looks(name):
            page.setdefault(text, "look")
    return found


@joblib.Memory(tutorial.CACHE, verbose=0).cache
def _kept(text, made_by):
    """Between builds as well: each counts the messages of all scripts."""
    return messages.messages(text)


def missing(found, code):
    """{catalog: how many of its messages are not translated}."""
    return {
        name: number
        for name, texts in found.items()
        for catalog in [catalogs.read(code, name)]
        if (number := sum(not catalogs.done(catalog.get(t)) for t in texts))
    }


def lacking(found):
    """The same for each language: {language: {catalog: how many}}."""
    return {each.code: missing(found, each.code) for each in TRANSLATED}


def refresh(found, code):
    """Write all catalogs of a language."""
    old = {name: catalogs.read(code, name) for name in found}
    memory = {
        message.id: message.string
        for catalog in old.values()
        for message in catalog
        if message.id and catalogs.done(message)
    }
    kept = set()
    for name, texts in found.items():
        file = catalogs.path(code, name)
        new = catalogs.refreshed(old[name], texts.items(), memory)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(catalogs.text_of(new, code), encoding="utf-8")
        kept.add(file)
    for file in (catalogs.LOCALE / code).rglob("*.po"):
        if file not in kept:
            file.unlink()
    catalogs.of_file.cache_clear()


def main():
    found = wanted()
    for language in TRANSLATED:
        refresh(found, language.code)
        lacking = missing(found, language.code)
        for name, number in lacking.items():
            print(f"{language.name}: {name}: {number} missing")
        if not lacking:
            print(f"{language.name}: complete")


if __name__ == "__main__":
    main()
