"""Formulas come ready from the build, as MathML: no script draws them.

docutils translates LaTeX. A command that it does not know, and what only
looks like LaTeX, is a warning with its place, and stops the build.

Few readers have a font that can draw formulas, so the site brings one with
the letters that they have: see tests/formula_font.py.
"""

import re
import xml.etree.ElementTree as ET

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

# Elements of docutils with a script, and what they are under or over a brace.
AT_BRACE = {"msub": ("munder", "⏟"), "msup": ("mover", "⏞")}
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


def setup(app):
    app.add_html_math_renderer("mathml", (visit, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
