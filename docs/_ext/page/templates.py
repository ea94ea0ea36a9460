"""``.. template:: NAME``: what a template of the site gives stands here.

For a drawing with words: gettext finds them in a template.
"""

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class Template(SphinxDirective):
    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        for folder in self.config.templates_path:
            file = Path(self.env.app.confdir, folder, name)
            if file.exists():
                self.env.note_dependency(str(file))
        text = self.env.app.builder.templates.render(name, {})
        return [nodes.raw("", text, format="html")]


def setup(app):
    app.add_directive("template", Template)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
