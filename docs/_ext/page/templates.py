"""``.. template:: NAME``: what a template of the site gives stands here.

For a drawing with words: gettext finds them in a template.
"""

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


def given_by(env, name, **values):
    """What a template gives."""
    text = env.app.builder.templates.render(name, values)
    return nodes.raw("", text, format="html")


class Template(SphinxDirective):
    required_arguments = 1

    def run(self):
        return [given_by(self.env, self.arguments[0])]


def setup(app):
    app.add_directive("template", Template)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
