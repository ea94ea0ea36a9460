"""The first use of a term on a tutorial's page leads to the glossary.

The terms are those of Sphinx's own ``.. glossary::``, in the language of this
build. An entry may list more forms of its term, such as a participle:

    .. also:: masked, masking

A regular plural needs no mention. Script and notebook are made from the
source, and so they have no such links.
"""

import re

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import tutorial
from translation import pages

# What in a paragraph is no running text, or leads elsewhere already.
NO_PROSE = nodes.reference, nodes.target, nodes.literal, nodes.math, nodes.raw
# In a translation the English stands behind a term: 分块（tile）.
PARTS = re.compile(r"[（）]")
LATIN = r"[A-Za-z0-9_-]"
# A word in katakana ends where they do: ロック is no part of ブロック.
KATAKANA = r"[゠-ヿ]"


class Also(SphinxDirective):
    """More forms of a term, which are not shown."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        forms = [form.strip() for form in self.arguments[0].split(",")]
        return [nodes.comment("", "", forms=forms)]


def note_forms(app, doctree):
    """Let more forms stand for the first term of their entry."""
    for item in doctree.findall(nodes.definition_list_item):
        for also in item.findall(nodes.comment):
            for form in also.get("forms", ()):
                app.env.domains.standard_domain.note_object(
                    "term", form, item[0]["ids"][0], location=item
                )


def terms(env):
    """{form: (page, id)} of all terms of the glossary."""
    objects = env.domains.standard_domain.objects
    return forms(
        {name: at for (kind, name), at in objects.items() if kind == "term"}
    )


def forms(places):
    """{form: place}, given {term: place}; the longest forms come first."""
    found = {}
    for name, place in places.items():
        for form in PARTS.split(name):
            if len(form) > 1:  # 锁 is a part of other words
                found[form] = place
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def any_of(found):
    """A regular expression for all forms, each of which is a group."""
    return re.compile("|".join(f"({pattern(form)})" for form in found))


def pattern(form):
    """A regular expression for a form, with its plural and a capital."""
    words = re.escape(form).replace("'", "['’]").replace(r"\ ", r"\s+")
    if form.islower():
        words = f"[{form[0]}{form[0].upper()}]" + words.removeprefix(form[0])
    if re.search("[A-Za-z]$", form):
        words += "(?:s|es)?"
    beside = KATAKANA if re.match(KATAKANA, form) else LATIN
    return f"(?<!{beside}){words}(?!{beside})"


def prepare(app, doctree, docname):
    if app.builder.format != "html" or not tutorial.of_page(docname):
        return

    def address(place):
        page, anchor = place
        return f"{app.builder.get_relative_uri(docname, page)}#{anchor}"

    link_first_uses(doctree, terms(app.env), address)


def link_first_uses(document, found, address):
    """Link them; found is {form: place}, and address(place) is a URI."""
    if not found:
        return
    places, any_form, linked = list(found.values()), any_of(found), set()
    for text in filter(is_prose, list(document.findall(nodes.Text))):
        parts, done = [], 0
        for match in any_form.finditer(text):
            place = places[match.lastindex - 1]
            if place not in linked:
                linked.add(place)
                parts.append(nodes.Text(text[done : match.start()]))
                parts.append(link(match[0], address(place)))
                done = match.end()
        if parts:
            parts.append(nodes.Text(text[done:]))
            text.parent.replace(text, parts)


def is_prose(text):
    """Whether this is running text of the page itself."""
    node, above = text, []
    while node := node.parent:
        if isinstance(node, NO_PROSE) or pages.OWN & {*node["classes"]}:
            return False
        above.append(node)
    return any(isinstance(node, nodes.paragraph) for node in above)


def link(words, address):
    return nodes.reference(
        "", words, refuri=address, internal=True, classes=["bp-term"]
    )


def setup(app):
    app.add_directive("also", Also)
    app.connect("doctree-read", note_forms)
    app.connect("doctree-resolved", prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
