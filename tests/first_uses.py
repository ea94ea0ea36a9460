"""Terms of the site's glossary whose English a translated page has not.

At its first use on a page a term has the English behind it: 分块（tile）. Who
reads on meets the English in code, in PyTorch's documentation and in papers.
It is asked for the terms of docs/glossary.rst that docs/locale/glossary.csv
has a word for: any engineer knows what a compiler is.
"""

import functools
import re

import checks_of_translations as checks
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from translation import catalogs, messages

ENTRY = re.compile(r"(?<=\n   )[A-Za-z][^\n]*(?=\n)")


@functools.cache
def terms(code):
    """{term: how a language says it}, the longest first; no term that stays
    as it is."""
    text = (catalogs.LOCALE.parent / "glossary.rst").read_text("utf-8")
    entries = ENTRY.findall(text.partition(".. glossary::\n")[2])
    found = {}
    for pattern, said in checks.glossary(code):
        term = checks.term_of(pattern)
        said = [each for each in said if each.lower() != term.lower()]
        if term in entries and said:
            found[term] = said
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


@functools.cache
def prose(name):
    """The messages of a page in its paragraphs and lists, below what it
    begins with: cards show its summary, where brackets would be in the way."""
    blocks = split_code_and_text_blocks(str(tutorial.script_of(name)))[1]
    found = []
    for block in blocks[1:]:
        if block.type == "text":
            said = messages.messages(f'r"""\n{block.content}\n"""')
            found += [text for text in said if not is_heading(text, block)]
    return found


def is_heading(text, block):
    return re.search(
        rf"^{re.escape(text)}\n([=\-~^])\1\1+$", block.content, re.MULTILINE
    )


def first_uses(name, code):
    """{term: the first message of a page's prose that uses it}."""
    found = {}
    for text in prose(name):
        # A link has the title of another page.
        left = checks.plain(checks.LINK.sub(" ", text))
        for term in terms(code):
            pattern = word(term)
            if re.search(pattern, left):
                found.setdefault(term, text)
                left = re.sub(pattern, " ", left)
    return found


def word(term):
    return rf"(?i:(?<![\w-]){re.escape(term)}(?:e?s)?(?![\w(-]))"


def without_english(name, code):
    """{term: (its first message, the first that has the English or None)}."""
    catalog = catalogs.read(code, tutorial.page_of(name))
    said = {m.id: catalogs.done(m) for m in catalog if m.id}
    order = list(said)
    found = {}
    for term, text in first_uses(name, code).items():
        if not said.get(text):
            continue  # the page has it in English
        glossed = next(
            (t for t in order if said[t] and has_english(term, said[t], code)),
            None,
        )
        late = glossed and order.index(glossed) > order.index(text)
        if glossed is None or late:
            found[term] = text, glossed
    return found


def has_english(term, said, code):
    """Whether a translation has a term with its English: 分块（tile）, or as a
    part, 原子加法（atomic addition）, or, as names in figures are explained,
    Backward（反向传播）."""
    english = rf"\b(?i:{re.escape(term)}(?:e?s)?)\b"
    text = re.sub(r"[`*“”「」]", "", said)
    return any(
        re.search(
            rf"{re.escape(each)}[^（）。，、]{{,6}}（[^（）]*{english}", text
        )
        or re.search(rf"{english}\s?（[^（）]*{re.escape(each)}", text)
        for each in terms(code)[term]
    )
