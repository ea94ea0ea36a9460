"""What leads to the tutorials, written from their own files.

``.. tutorial-path::`` a line for each of them, by section: the front page.
``.. tutorial-cards::`` a card for each, with its measured figure: an index.

Titles and summaries come from the tutorial's first lines, the picture is one
of its own, and the speeds are computed from the recording at build time.
"""

from docutils import nodes
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

import tutorial
import words_later as words
from measurements import recording
from page import captions, figures, headlines
from translation import catalogs, sentences


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
        head, lead, *_ = index.read_text(encoding="utf-8").split("\n\n")
        page = f"{section}/index"
        link = link_to(self.env, page, self.said(page, head.split("\n")[0]))
        found = nodes.section(ids=[f"section-{section}"])
        found += nodes.title("", "", link)
        found += nodes.paragraph("", self.said(page, lead))
        found += self.list(names)
        return found

    def said(self, page, text):
        """What another page says, from its catalog."""
        words = catalogs.compiled(f"tutorials/{page}")
        if words.exists():  # a missing file would always count as changed
            self.env.note_dependency(str(words))
        return catalogs.said(f"tutorials/{page}", text)

    def head(self, name):
        """The number and the linked title of a tutorial; its summary."""
        self.env.note_dependency(str(tutorial.script_of(name)))
        summary = self.said(name, tutorial.summary(name)).replace("``", "")
        link = link_to(self.env, name, self.said(name, tutorial.title(name)))
        number = name.rpartition("/")[2][:2]
        return [
            nodes.paragraph("", number, classes=["bp-card-number"]),
            nodes.paragraph("", "", link, classes=["bp-card-title"]),
        ], summary

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
        number_and_title, summary = self.head(name)
        step = nodes.container(classes=["bp-step"])
        step += number_and_title
        step += nodes.paragraph("", sentences.split(summary)[0])
        step += speeds(self.recording(name))
        return step


class TutorialCards(OfTutorials):
    """A card for each tutorial: of this section, or of all, by section."""

    def list(self, names):
        cards = nodes.container(classes=["bp-cards"])
        cards += [self.card(name) for name in names]
        return cards

    def card(self, name):
        number_and_title, summary = self.head(name)
        card = nodes.container(classes=["bp-card"])
        card += self.pictures(name)
        card += number_and_title
        card += nodes.paragraph("", summary, classes=["bp-card-summary"])
        card += speeds(self.recording(name))
        return card

    def pictures(self, name):
        """A measured figure of the tutorial in both forms, and its caption."""
        srcdir = self.env.srcdir
        measured = figures.of_card(srcdir, name)
        if measured is None:
            return
        self.env.note_dependency(
            str(figures.file_of(srcdir, measured.picture))
        )
        paths = figures.pictures(srcdir, measured.picture)
        for path, theme in zip(paths, ("light", "dark"), strict=True):
            yield nodes.image(
                uri=f"/tutorials/images/{path.name}",
                # The title beside it and the caption say what it shows.
                alt="",
                classes=[f"only-{theme}", "bp-card-picture"],
            )
        caption = captions.caption(measured)
        yield nodes.paragraph("", caption, classes=["bp-card-caption"])


def link_to(env, name, text):
    """A link to a tutorial, which Sphinx-Gallery may not have made yet."""
    uri = env.app.builder.get_relative_uri(env.docname, f"tutorials/{name}")
    return nodes.reference("", text, refuri=uri, internal=True)


def speeds(data):
    """Each pass against PyTorch, and of what the numbers are."""
    box = nodes.container(classes=["bp-speeds"])
    if data is None:
        box += nodes.paragraph("", _("Not recorded yet."))
        return box
    headline = headlines.of(data)
    if headline is None:
        return box
    said = nodes.paragraph(classes=["bp-card-figure"])
    for mode, speed in headline.speeds.items():
        passes = nodes.inline(classes=["bp-said"])
        kind = mode.split(" ")[0] if " " not in mode else "both"
        passes += nodes.inline(
            "", _(headlines.PASSES[mode]), classes=["bp-pass", kind]
        )
        # Translators: how many times as fast, and as what.
        faster = _("%(speed)s × %(rival)s") % {
            "speed": f"{speed:.2f}",
            "rival": _(headline.rival),
        }
        passes += nodes.Text(f" {faster}")
        said += [passes, nodes.Text(" ")]
    where = words.in_a_row([*headline.where, ""], _)  # the date follows
    source = nodes.paragraph("", where, classes=["bp-card-source"])
    source += nodes.inline("", headline.date, classes=["bp-date"])
    box += [said, source]
    return box


def setup(app):
    app.add_directive("tutorial-path", TutorialPath)
    app.add_directive("tutorial-cards", TutorialCards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
