"""Refresh the catalogs: ``make translations``.

What is translated stays. A changed message becomes fuzzy, with the old one
beside it. What stands on several pages is translated once.
"""

import json

from languages import TRANSLATED
from translation import catalogs, pages, words


def wanted():
    """{catalog: {message: note}} of all that the site says in English."""
    found = {catalogs.WORDS: {t: note for t, note, _ in words.messages()}}
    for page, texts in json.loads(pages.FILE.read_text("utf-8")).items():
        found[page] = dict.fromkeys(texts, "")
    return found


def missing(found, code):
    """{catalog: how many of its messages are not translated}."""
    counted = {}
    for name, texts in found.items():
        catalog = catalogs.read(code, name)
        counted[name] = sum(not catalogs.done(catalog.get(t)) for t in texts)
    return {name: number for name, number in counted.items() if number}


def summary():
    """A line for each language that lacks something."""
    found = wanted()
    for language in TRANSLATED:
        if lacking := missing(found, language.code):
            yield (
                f"{language.name}: {sum(lacking.values())} messages are shown "
                f"in English ({', '.join(lacking)}): make translations"
            )


def refreshed(old, texts, memory):
    """A catalog with these messages, {text: note}, in their order.

    A new message takes the translation that memory has, {text: translation},
    or as a fuzzy one that of a message which has gone and was much like it.
    """
    template = catalogs.Catalog()
    for text, note in texts.items():
        template.add(text, auto_comments=[note] * bool(note))
    for text in texts:
        if not catalogs.done(old.get(text)) and text in memory:
            old.delete(text)
            old.add(text, memory[text])
    before = {m.id: m.previous_id for m in old if m.previous_id}
    old.update(template)
    for text in before.keys() & texts.keys():  # which Babel forgets
        old[text].previous_id = before[text]
    old.obsolete.clear()
    return old


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
        new = refreshed(old[name], texts, memory)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(catalogs.text_of(new, code), encoding="utf-8")
        kept.add(file)
    for file in (catalogs.LOCALE / code).rglob("*.po"):
        if file not in kept:
            file.unlink()


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
