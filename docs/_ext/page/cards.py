"""What leads to the tutorials, written from their own files.

``.. tutorial-path::`` a line for each of them, by section: the front page.
``.. tutorial-cards::`` a card for each, with its measured figure: an index.
``.. first-tutorial:: TEXT`` a link to the first one.

Titles and summaries come from the tutorial's first lines, the picture is one
of its own, and the speeds are computed from the recording at build time.
"""

import re

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinx_gallery.gen_rst import extract_intro_and_title
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from measurements import recording
from page import headlines
from page.figures import card_pictures


class FirstTutorial(SphinxDirective):
    """A link to the tutorial that a reader starts with."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        name = tutorial.name_of(tutorial.scripts()[0])
        link = link_to(self.env, name, self.arguments[0])
        return [nodes.paragraph("", "", link)]


class OfTutorials(SphinxDirective):
    """What both lists of tutorials are made of."""

    def run(self):
        groups = {}
        for script in tutorial.scripts():
            name = tutorial.name_of(script)
            groups.setdefault(name.rpartition("/")[0], []).append(name)
        here = self.env.docname.removeprefix("tutorials/")
        if (section := here.removesuffix("/index")) in groups:
            return [self.list(groups[section])]
        return [
            self.section(name, names) if name else self.list(names)
            for name, names in groups.items()
        ]

    def section(self, section, names):
        """A section under its title and its sentences."""
        index = tutorial.TUTORIALS / section / "index.rst"
        self.env.note_dependency(str(index))
        head, said, *_ = index.read_text(encoding="utf-8").split("\n\n")
        link = link_to(self.env, f"{section}/index", head.split("\n")[0])
        found = nodes.section(ids=[f"section-{section}"])
        found += nodes.title("", "", link)
        found += nodes.paragraph("", " ".join(said.split()))
        found += self.list(names)
        return found

    def title_and_summary(self, name):
        script = tutorial.script_of(name)
        self.env.note_dependency(str(script))
        _, blocks = split_code_and_text_blocks(str(script))
        summary, title = extract_intro_and_title(script, blocks[0].content)
        return link_to(self.env, name, title), summary

    def recording(self, name):
        """What was measured for a tutorial, or None."""
        gpu = self.config.measured_gpu
        self.env.note_dependency(str(recording.path_of(gpu, name)))
        try:
            return recording.load(gpu, name)
        except recording.RecordingError:
            return None


class TutorialPath(OfTutorials):
    """A line for each tutorial: title, question, and speed."""

    def list(self, names):
        path = nodes.container(classes=["bp-path"])
        path += [self.step(name) for name in names]
        return path

    def step(self, name):
        link, summary = self.title_and_summary(name)
        step = nodes.container(classes=["bp-step"])
        number = name.rpartition("/")[2][:2]
        step += nodes.paragraph("", number, classes=["bp-card-number"])
        step += nodes.paragraph("", "", link, classes=["bp-card-title"])
        step += nodes.paragraph("", first_sentence(summary))
        step += speeds(self.recording(name))
        return step


class TutorialCards(OfTutorials):
    """A card for each tutorial: of this section, or of all, by section."""

    def list(self, names):
        cards = nodes.container(classes=["bp-cards"])
        cards += [self.card(name) for name in names]
        return cards

    def card(self, name):
        link, summary = self.title_and_summary(name)
        data = self.recording(name)
        card = nodes.container(classes=["bp-card"])
        card += self.pictures(name)
        number = name.rpartition("/")[2][:2]
        card += nodes.paragraph("", number, classes=["bp-card-number"])
        card += nodes.paragraph("", "", link, classes=["bp-card-title"])
        card += nodes.paragraph("", summary, classes=["bp-card-summary"])
        card += speeds(data)
        return card

    def pictures(self, name):
        """A measured figure of the tutorial in both forms, and its caption."""
        light, *_, said = paths = card_pictures(self.env.srcdir, name)
        if not light.exists():
            return
        for path, theme in zip(paths, ("light", "dark"), strict=False):
            yield nodes.image(
                uri=f"/tutorials/images/{path.name}",
                # The title beside it and the caption say what it shows.
                alt="",
                classes=[f"only-{theme}", "bp-card-picture"],
            )
        caption = said.read_text(encoding="utf-8")
        yield nodes.paragraph("", caption, classes=["bp-card-caption"])


def link_to(env, name, text):
    """A link to a tutorial, which Sphinx-Gallery may not have made yet."""
    uri = env.app.builder.get_relative_uri(env.docname, f"tutorials/{name}")
    return nodes.reference("", text, refuri=uri, internal=True)


def first_sentence(text):
    return re.split(r"(?<=[.?!])\s", text)[0]


def speeds(data):
    """Each pass against PyTorch, and of what the numbers are."""
    box = nodes.container(classes=["bp-speeds"])
    if data is None:
        box += nodes.paragraph("", "Not recorded yet.")
        return box
    headline = headlines.of(data)
    if headline is None:
        return box
    said = nodes.paragraph(classes=["bp-card-figure"])
    for mode, speed in headline.speeds.items():
        passes = nodes.inline(classes=["bp-said"])
        kind = mode.split(" ")[0] if " " not in mode else "both"
        passes += nodes.inline(
            "", mode.capitalize(), classes=["bp-pass", kind]
        )
        passes += nodes.Text(f" {speed:.2f} × PyTorch")
        said += [passes, nodes.Text(" ")]
    source = f"{headline.where}, {headline.date}"
    box += [said, nodes.paragraph("", source, classes=["bp-card-source"])]
    return box


def setup(app):
    app.add_directive("first-tutorial", FirstTutorial)
    app.add_directive("tutorial-path", TutorialPath)
    app.add_directive("tutorial-cards", TutorialCards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
