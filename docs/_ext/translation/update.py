"""Refresh the catalogs: ``make translations``.

What is translated stays. A changed message becomes fuzzy, with the old one
beside it. What stands on several pages is translated once.
"""

import tutorial
from languages import TRANSLATED
from translation import catalogs, messages, pages, words


def wanted():
    """{catalog: {message: note}} of all that the site says in English."""
    return of_pages() | of_tutorials()


def of_pages():
    """The words of the mechanism, and of all pages that are no tutorials."""
    found = {catalogs.WORDS: {t: note for t, note, _ in words.messages()}}
    for name in catalogs.pages():
        found[name] = dict.fromkeys(pages.messages(name), "")
    return found


def of_tutorials():
    found = {}
    for script in tutorial.scripts():
        name = tutorial.name_of(script)
        said = messages.messages(script.read_text(encoding="utf-8"))
        page = found[f"tutorials/{name}"] = {}
        for message in said:
            page.setdefault(message.text, message.kind)
        for text in words.looks(name):
            page.setdefault(text, "look")
    return found


def missing(found, code):
    """{catalog: how many of its messages are not translated}."""
    return {
        name: number
        for name, texts in found.items()
        for catalog in [catalogs.read(code, name)]
        if (number := sum(not catalogs.done(catalog.get(t)) for t in texts))
    }


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
