"""What leads to the tutorials, written from their own files.

``.. tutorial-path::`` a line for each of them, by section: the front page.
``.. tutorial-cards::`` a card for each, with its measured figure: an index.

Titles and summaries come from the tutorial's first lines, the picture is one
of its own, and the speeds are computed from the recording at build time.
"""

from contextlib import suppress

from docutils import nodes
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

import tutorial
import words_later as words
from measurements import recording
from page import captions, figures, headlines
from translation import catalogs, sentences
from translation.lines import close


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
        head, lead, *_ = index.read_text(encoding="utf-8").split("\n\n")
        page = f"{section}/index"
        said = catalogs.lookup(f"tutorials/{page}")
        link = link_to(self.env, page, said(head.split("\n")[0]))
        found = nodes.section(ids=[f"section-{section}"])
        found += nodes.title("", "", link)
        found += nodes.paragraph("", said(" ".join(lead.split())))
        found += self.list(names)
        return found

    def head(self, name):
        """The number and the linked title of a tutorial; its summary."""
        link = link_to(self.env, name, catalogs.title(name))
        number = name.rpartition("/")[2][:2]
        return [
            nodes.paragraph("", number, classes=["bp-card-number"]),
            nodes.paragraph("", "", link, classes=["bp-card-title"]),
        ], catalogs.summary(name)

    def recording(self, name):
        """What was measured for a tutorial, or None."""
        default = self.config.measured_gpu
        for gpu in recording.gpus(name, default) or [default]:
            with suppress(recording.RecordingError):
                return recording.load(gpu, name)
        return None


class TutorialPath(OfTutorials):
    """A line for each tutorial: title, question, picture, and speed."""

    def list(self, names):
        path = nodes.container(classes=["bp-path"])
        path += [self.step(name) for name in names]
        return path

    def step(self, name):
        number_and_title, summary = self.head(name)
        step = nodes.container(classes=["bp-step"])
        step += number_and_title
        step += nodes.paragraph("", sentences.split(summary)[0])
        if figures.of_card(self.env.srcdir, name):
            step += both_forms(
                self.env.srcdir, figures.outline(name), "bp-step-picture"
            )
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
        if measured := figures.of_card(self.env.srcdir, name):
            yield from both_forms(
                self.env.srcdir, measured.picture, "bp-card-picture"
            )
            caption = captions.caption(measured)
            yield nodes.paragraph("", caption, classes=["bp-card-caption"])


def both_forms(srcdir, picture, kind):
    """A picture for light and dark; the words beside it say what it shows."""
    paths = figures.pictures(srcdir, picture)
    for path, theme in zip(paths, ("light", "dark"), strict=True):
        yield nodes.image(
            uri=f"/tutorials/images/{path.name}",
            alt="",
            classes=[f"only-{theme}", kind],
        )


def link_to(env, name, text):
    """A link to a tutorial, which Sphinx-Gallery may not have made yet."""
    uri = env.app.builder.get_relative_uri(env.docname, f"tutorials/{name}")
    return nodes.reference("", text, refuri=uri, internal=True)


def speeds(data):
    """The speed in each pass over that of others, and of what it is."""
    box = nodes.container(classes=["bp-speeds"])
    if data is None:
        box += nodes.paragraph("", _("Not recorded yet."))
        return box
    headline = headlines.of(data)
    if headline is None:
        return box
    lines = nodes.paragraph(classes=["bp-card-figure"])
    for each in headline.passes:
        lines += line(headlines.PASSES[each.mode], each, faster(each))
    for each in headline.calls:
        # Translators: some speeds, and the size of which they are.
        at = _("%(speeds)s at %(size)s") % {
            "speeds": faster(each),
            "size": unbroken(words.in_a_row(headline.called_at, _)),
        }
        lines += line(headlines.CALLS[each.mode], each, at)
    where = words.in_a_row([*headline.where, ""], _)  # the date follows
    source = nodes.paragraph("", where, classes=["bp-card-source"])
    source += nodes.inline("", headline.date, classes=["bp-date"])
    box += [lines, source]
    return box


def line(name, speed, text):
    """What a headline says of a pass."""
    both = speed.mode == "forward and backward"
    said = nodes.inline(classes=["bp-said"])
    said += nodes.inline(
        "", _(name), classes=["bp-pass", "both" if both else speed.mode]
    )
    said += nodes.Text(f" {text}")
    return [said, nodes.Text(" ")]


def faster(speed):
    """How many times as fast, and as what."""
    said = []
    for name, times in speed.over:
        # Translators: how many times as fast, and as what.
        text = _("%(speed)s × %(rival)s") % {
            "speed": f"{times:.2f}",
            "rival": _(name),
        }
        said.append(unbroken(close(text)))
    return words.in_a_row(said, _)


def unbroken(text):
    """Words that stay in one line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def setup(app):
    app.add_directive("tutorial-path", TutorialPath)
    app.add_directive("tutorial-cards", TutorialCards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
