"""``.. tutorial-cards::``: a card for each tutorial, with its measured figure.
``.. first-tutorial:: TEXT``: a link to the first one.

Title and summary come from the tutorial's first lines, the picture is one of
its own, and the headline is computed from the recording at build time.
"""

import math

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinx_gallery.gen_rst import extract_intro_and_title
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from measurements import recording
from page.figures import card_pictures


class FirstTutorial(SphinxDirective):
    """A link to the tutorial that a reader starts with."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        name = tutorial.name_of(tutorial.scripts()[0])
        link = link_to(self.env, name, self.arguments[0])
        return [nodes.paragraph("", "", link)]


class TutorialCards(SphinxDirective):
    """A card for each tutorial: of this section, or of all, by section."""

    def run(self):
        groups = {}
        for script in tutorial.scripts():
            name = tutorial.name_of(script)
            groups.setdefault(name.rpartition("/")[0], []).append(name)
        here = self.env.docname.removeprefix("tutorials/")
        if (section := here.removesuffix("/index")) in groups:
            return [self.grid(groups[section])]
        return [
            self.section(name, names) if name else self.grid(names)
            for name, names in groups.items()
        ]

    def section(self, section, names):
        """The cards of a section under its title and its sentence."""
        index = tutorial.TUTORIALS / section / "index.rst"
        self.env.note_dependency(str(index))
        head, said, *_ = index.read_text(encoding="utf-8").split("\n\n")
        link = link_to(self.env, f"{section}/index", head.split("\n")[0])
        found = nodes.section(ids=[f"section-{section}"])
        found += nodes.title("", "", link)
        found += nodes.paragraph("", " ".join(said.split()))
        found += self.grid(names)
        return found

    def grid(self, names):
        cards = nodes.container(classes=["bp-cards"])
        cards += [self.card(name) for name in names]
        return cards

    def card(self, name):
        script = tutorial.script_of(name)
        self.env.note_dependency(str(script))
        _, blocks = split_code_and_text_blocks(str(script))
        summary, title = extract_intro_and_title(script, blocks[0].content)
        card = nodes.container(classes=["bp-card"])
        card += self.pictures(name)
        link = link_to(self.env, name, title)
        number = script.stem[:2]
        card += nodes.paragraph("", number, classes=["bp-card-number"])
        heading = nodes.paragraph("", "", link, classes=["bp-card-title"])
        card += heading
        card += nodes.paragraph("", summary, classes=["bp-card-summary"])
        gpu = self.config.measured_gpu
        card += headlines(gpu, name)
        self.env.note_dependency(str(recording.path_of(gpu, name)))
        return card

    def pictures(self, name):
        """A measured figure of the tutorial, in its light and dark form."""
        for path, theme in zip(
            card_pictures(self.env.srcdir, name),
            ("light", "dark"),
            strict=True,
        ):
            if path.exists():
                yield nodes.image(
                    uri=f"/tutorials/images/{path.name}",
                    # The title beside it says what the picture would.
                    alt="",
                    classes=[f"only-{theme}", "bp-card-picture"],
                )


def link_to(env, name, text):
    """A link to a tutorial, which Sphinx-Gallery may not have made yet."""
    uri = env.app.builder.get_relative_uri(env.docname, f"tutorials/{name}")
    return nodes.reference("", text, refuri=uri, internal=True)


def headlines(gpu, name):
    """What the recording says in a paragraph a pass, and where it is from."""
    try:
        data = recording.load(gpu, name)
    except recording.RecordingError:
        return [nodes.paragraph("", "Not recorded yet.")]
    lines, sources = [], {}
    for benchmark in data["benchmarks"].values():
        if said := headline(benchmark):
            env = benchmark["environment"]
            sources[f"{env['gpu']}, {env['date']}"] = None
            mode = str(benchmark["args"].get("mode", ""))
            line = nodes.paragraph(classes=["bp-card-figure"])
            if mode:
                line += nodes.inline(
                    "", f"{mode.capitalize()}:", classes=["bp-pass", mode]
                )
                line += nodes.Text(" ")
            line += nodes.inline("", said, classes=["bp-said"])
            lines.append(line)
    if lines:
        source = "; ".join(sources)
        lines.append(nodes.paragraph("", source, classes=["bp-card-source"]))
    return lines


def headline(benchmark):
    """One benchmark in a line: against PyTorch, and against a plain copy."""
    if benchmark["unit"] != "GB/s":
        return None
    speeds = {}
    for row in benchmark["rows"]:
        x = recording.x_of(row, benchmark["x_names"])
        speeds.setdefault(row["provider"], {})[x] = row["median"]
    if not {"triton", "torch", "copy"} <= speeds.keys():
        return None
    faster = geometric_mean(speeds["triton"], speeds["torch"])
    share = geometric_mean(speeds["triton"], speeds["copy"])
    return (
        f"{faster:.2f} × the speed of PyTorch, "
        f"{100 * share:.0f} % of the speed of a plain copy"
    )


def geometric_mean(ours, theirs):
    """The geometric mean of ours / theirs over the sizes that both have."""
    logs = [
        math.log(ours[x] / theirs[x])
        for x in ours
        if ours[x] and theirs.get(x)
    ]
    return math.exp(sum(logs) / len(logs))


def setup(app):
    app.add_directive("first-tutorial", FirstTutorial)
    app.add_directive("tutorial-cards", TutorialCards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
