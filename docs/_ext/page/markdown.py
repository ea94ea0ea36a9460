"""Each page as Markdown, and ``llms.txt``, which leads to all of them.

For assistants, which quote what they can read. A page is found at its own
address with ``.md`` behind it, as llmstxt.org asks: text, code, formulas in
TeX, pictures as links, and the numbers of each figure as a table. Its first
lines say where it stands and what may be done with it.

sphinx-markdown-builder writes it, from what Sphinx makes HTML of. What it
cannot know is here: whole addresses, what is folded, tabs, and what of an
X-ray panel reads as text.
"""

from pathlib import Path
from urllib.parse import urljoin

from docutils import nodes
from sphinx.locale import _
from sphinx_markdown_builder.contexts import SubContextParams, TableContext
from sphinx_markdown_builder.translator import MarkdownTranslator

import tutorial
import words_later as words
from languages import BUILT, CURRENT
from page import dates, gpu_needs, rights
from translation import catalogs, sentences

ENDING = ".md"


class Table(TableContext):
    """With its numbers as they are written, and without HTML."""

    def make(self):
        rows = [
            [
                " ".join("".join(cell).split()).replace("|", r"\|")
                for cell in row
            ]
            for row in [*self.headers, *self.body]
        ]
        rows[1:1] = [["---"] * len(rows[0])]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)


class Translator(MarkdownTranslator):
    """Of a page whose nodes are ready to become HTML."""

    def __init__(self, document, builder, page):
        super().__init__(document, builder)
        self.site = self.config.html_baseurl
        self.address = self.site + builder.get_target_uri(page)

    def _skip(self, node):
        raise nodes.SkipNode

    visit_comment = visit_raw = visit_target = visit_toctree = _skip
    visit_sd_tab_input = _skip

    def _add_anchor(self, anchor):
        """None: Markdown has no word for it."""

    visit_admonition = MarkdownTranslator._pass

    def visit_title(self, node):
        if isinstance(node.parent, nodes.admonition):
            self.visit_sd_tab_label(node)
        super().visit_title(node)

    def depart_title(self, node):
        self._pop_context(node)

    def visit_sd_tab_label(self, node):
        """A title in bold, with the code that it names."""
        said = "".join(
            f"`{child.astext()}`"
            if isinstance(child, nodes.literal)
            else child.astext()
            for child in node.children
        )
        self.add(f"**{said}**", prefix_eol=2, suffix_eol=2)
        raise nodes.SkipNode

    def visit_dropdown_title(self, node):
        """What is folded stands under its title, without the arrow."""
        (title,) = node.findall(lambda n: "sd-summary-text" in classes(n))
        self.visit_sd_tab_label(title)

    def visit_dropdown_main(self, node):
        """Of a panel the numbers for one GPU; the page has the others."""
        if "bp-xray" in node["classes"]:
            title, body = node.children
            for child in [title, *body.children]:
                if "sd-tab-set" in classes(child):
                    child = shown(child)
                child.walkabout(self)
            raise nodes.SkipNode

    def depart_dropdown_main(self, node):
        pass

    def visit_table(self, node):
        self._push_context(Table(params=SubContextParams(2, 2)))

    def depart_table(self, node):
        self._pop_context(node)

    def visit_literal_block(self, node):
        """Without the links that a page has in its code."""
        language = node.get("language") or node.get("lang", "")
        kind = "" if language == "none" else language.lower()
        text = node.astext().strip("\n")
        self.add(f"```{kind}\n{text}\n```", prefix_eol=2, suffix_eol=2)
        raise nodes.SkipNode

    visit_code_links_block = visit_literal_block

    def visit_math_block(self, node):
        tex = node.astext().strip()
        self.add(f"$$\n{tex}\n$$", prefix_eol=2, suffix_eol=2)
        raise nodes.SkipNode

    def visit_literal(self, node):
        mark = "``" if "`" in node.astext() else "`"
        self.add(f"{mark}{node.astext()}{mark}")
        raise nodes.SkipNode

    def visit_image(self, node):
        """A link with what the picture shows, in one of its two forms."""
        if node.get("alt") and "only-dark" not in node["classes"]:
            # HTML has been written, and has left the picture's own address.
            there = urljoin(self.address, node["uri"])
            said = _("Figure: %(shows)s") % {"shows": node["alt"]}
            self.add(f"[{said}]({there})", prefix_eol=2, suffix_eol=2)
        raise nodes.SkipNode

    def visit_download_reference(self, node):
        """A file whose name may be code: here it is a word."""
        there = node.get("refuri") or (
            f"{self.site}_downloads/{node['filename']}"
        )
        self.add(f"[{node.astext()}]({there})")
        raise nodes.SkipNode

    def _fetch_ref_uri(self, node):
        there = node.get("refuri") or f"#{node['refid']}"
        return urljoin(self.address, there)


def classes(node):
    return getattr(node, "attributes", {}).get("classes", ())


def shown(tabs):
    """The table of the tab that is open."""
    for choice, _label, content in zip(
        *(tabs.children[i::3] for i in range(3)), strict=True
    ):
        if choice["checked"]:
            return next(content.findall(nodes.table))
    raise LookupError("no tab is open")


def write(app, pagename, templatename, context, doctree):
    """Write the Markdown of a page beside its HTML, and lead there."""
    if doctree is None or pagename == app.config.notfound_pagename:
        return
    translator = Translator(doctree, app.builder, pagename)
    doctree.walkabout(translator)
    title, _end, rest = translator.astext().partition("\n")
    head = "".join(f"- {line}\n" for line in about(app, pagename))
    context["markdown"] = app.builder.get_target_uri(pagename) + ENDING
    file = Path(app.outdir, context["markdown"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{title}\n\n{head}{rest}", encoding="utf-8")


def about(app, pagename):
    """Where a page stands, when it was measured, and its license."""
    config = app.config
    yield _("Address: %(address)s") % {"address": address(app, pagename)}
    if name := tutorial.of_page(pagename):
        if date := dates.published(name):
            yield _("Published %(date)s.") % {"date": date}
        for date, gpus in dates.measured(app.srcdir, name).items():
            measured = _("Measured %(date)s on %(gpus)s.")
            yield measured % {"date": date, "gpus": words.in_a_row(gpus, _)}
        if said := gpu_needs.said(app.srcdir, name):
            yield said
    tagline = sentences.ended(_(config.tagline))
    yield f"{config.project}: {tagline}"
    yield rights.said(config)


def address(app, pagename, ending=""):
    """Where a page is; that of a folder without the name of its file."""
    there = app.config.html_baseurl + app.builder.get_target_uri(pagename)
    return there + ending if ending else there.removesuffix("index.html")


def llms_txt(app):
    """All pages with a line each, as llmstxt.org asks."""
    config, env = app.config, app.env
    tagline = sentences.ended(_(config.tagline))
    yield f"# {config.project}\n\n> {tagline}\n"
    yield sentences.joined(
        [
            _(
                "Each tutorial is a script that runs by itself; its speeds "
                "were measured on the GPUs that it names."
            ),
            _("Who quotes a number also names its GPU and its date."),
            _("All of it is under the MIT license, copyright %(copyright)s.")
            % {"copyright": config.copyright},
        ]
    )
    yield ""
    for each in BUILT:
        if each is not CURRENT:
            there = f"{config.site_url}{each.folder}/llms.txt"
            yield f"- [{each.name}]({there})"
    others = sorted(
        page
        for page in env.found_docs
        if not page.startswith("tutorials/")
        and page not in (config.root_doc, config.notfound_pagename)
    )
    aside = [page for page in others if page in config.search_aside]
    others = [page for page in others if page not in aside]
    names = list(map(tutorial.name_of, tutorial.scripts()))
    alone = [tutorial.page_of(name) for name in names if "/" not in name]
    title = env.titles["tutorials/index"].astext()
    groups = {title: ["tutorials/index", *alone]}
    for section in tutorial.sections():
        page = f"tutorials/{section}/index"
        its = [name for name in names if name.startswith(f"{section}/")]
        pages = [page, *map(tutorial.page_of, its)]
        groups[env.titles[page].astext()] = pages
    groups[_("The site")] = [config.root_doc, *others]
    groups["Optional"] = aside  # so it is called in every language
    for title, pages in groups.items():
        if pages:
            yield f"\n## {title}\n"
        for page in pages:
            there = address(app, page, ENDING)
            title = env.titles[page].astext()
            yield f"- [{title}]({there}): {in_a_line(app, page)}"


def in_a_line(app, page):
    """What a page says first, or a tutorial in its first paragraph."""
    if name := tutorial.of_page(page):
        return catalogs.summary(name, code="`")
    if page == app.config.root_doc:
        return sentences.ended(_(app.config.tagline))
    doctree = app.env.get_doctree(page)
    first = next(iter(doctree.findall(nodes.paragraph)), None)
    return " ".join(first.astext().split()) if first else ""


def list_pages(app, exception):
    if exception is None and app.builder.name == "html":
        text = "\n".join(llms_txt(app)) + "\n"
        Path(app.outdir, "llms.txt").write_text(text, encoding="utf-8")


def setup(app):
    app.setup_extension("sphinx_markdown_builder")
    app.connect("html-page-context", write)
    app.connect("build-finished", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
