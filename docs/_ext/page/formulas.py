"""Formulas come ready from the build, as MathML: no script draws them.

docutils translates LaTeX. A command that it does not know, and what only
looks like LaTeX, is a warning with its place, and stops the build.

Few readers have a font that can draw formulas, so the site brings one, with
the letters that its formulas have.
"""

import re
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

# Elements of docutils with a script, and what they are under or over a brace.
AT_BRACE = {"msub": ("munder", "⏟"), "msup": ("mover", "⏞")}
FONT = "_fonts/noto-sans-math.woff"
MADE = "_static/formulas.woff"
# A browser shows a variable, one letter, as one of these.
ITALIC = [
    letter
    for letter in map(chr, (0x210E, *range(0x1D434, 0x1D7CC)))
    if unicodedata.name(letter, "").startswith(
        ("MATHEMATICAL ITALIC", "PLANCK")
    )
]
WIDE = "2em"  # the space of \qquad, where a line may break

logger = logging.getLogger(__name__)


def mathml(tex, block=False):
    """A formula in MathML; one that is displayed, in parts between \\qquad."""
    braces = re.sub(r"\\[{}]", "", tex)
    if braces.count("{") != braces.count("}"):
        raise MathError("Braces without a partner.")
    text = latex2mathml.tex2mathml(tex, as_block=block)
    text = text.replace("&ApplyFunction;", "\u2061")
    text = re.sub(r">\s+<", "><", re.sub(r' xmlns="[^"]*"', "", text))
    root = ET.fromstring(text)
    for element in list(root.iter()):
        repair(element)
    parts = split(root) if block else [root]
    return "".join(
        ET.tostring(part, encoding="unicode", short_empty_elements=False)
        for part in parts
    )


def repair(element):
    """Two things that docutils puts where TeX does not."""
    tag, brace = AT_BRACE.get(element.tag, (None, None))
    if tag and brace in [mo.text for mo in element[0]]:
        element.tag = tag  # a name of what the brace holds: under it
    if element.tag == "munderover" and element[2].get("stretchy") == "false":
        base, script, accent = element  # \hat{x}_j: beside it
        element.tag = "msub"
        element[:] = [ET.Element("mover", accent="true"), script]
        element[0].extend([base, accent])


def split(root):
    """The parts of a displayed formula, each a formula."""
    parts = [ET.Element(root.tag, root.attrib)]
    for child in root:
        if child.tag == "mspace" and child.get("width") == WIDE:
            parts.append(ET.Element(root.tag, root.attrib))
        else:
            parts[-1].append(child)
    return parts


def translated(node, block=False):
    try:
        return mathml(node.astext(), block)
    except MathError as error:
        logger.warning("a formula: %s %r", error, node.astext(), location=node)
        return ""


def visit(translator, node):
    translator.body.append(translated(node))
    raise nodes.SkipNode


def visit_block(translator, node):
    start = translator.starttag(node, "div", CLASS="math notranslate")
    translator.body.append(start + translated(node, block=True))
    if node["number"]:
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<span class="eqno">({number})</span>')
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def plainly(letter):
    return unicodedata.normalize("NFKC", letter)


def write_font(app, pages):
    """What the formulas of the site need of the font, for site.css."""
    text = "".join(pages.values())
    shown = set("".join(re.findall(r"<math.*?</math>", text, re.S)))
    plain = set(map(plainly, shown))
    shown.update(letter for letter in ITALIC if plainly(letter) in plain)
    text = "".join(sorted(shown))
    made, known = app.outdir / MADE, app.doctreedir / "formulas.txt"
    if made.exists() and known.exists() and known.read_text("utf-8") == text:
        return
    from fontTools import subset
    from fontTools.ttLib import TTFont

    # A style of Pygments lets all libraries say what they do.
    subset.log.setLevel("WARNING")
    # Without the time of the build: the same letters give the same file.
    font = TTFont(Path(app.srcdir, FONT), recalcTimestamp=False)
    subsetter = subset.Subsetter(subset.Options(layout_features=["*"]))
    subsetter.populate(text=text)
    subsetter.subset(font)
    font.save(made)
    known.write_text(text, encoding="utf-8")


def setup(app):
    app.setup_extension("page.written")
    app.connect("pages-written", write_font)
    app.add_html_math_renderer("mathml", (visit, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
