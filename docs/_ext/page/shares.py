"""One page's kernels on several GPUs: ``.. shares-of-copy::``.

The figure shows their speed in % of that of the copy on the same GPU, a line
for each GPU. All of it is computed from the recordings of ``compared_page`` in
conf.py. Where fewer than two of them fit there is nothing to compare, and the
directive says nothing.
"""

from contextlib import suppress
from textwrap import indent

from sphinx.locale import _
from sphinx.util import rst
from sphinx.util.docutils import SphinxDirective

import style
import tutorial
import words_later as words
from languages import CURRENT, ENGLISH
from measurements import recording
from measurements.replay import Measured
from page import captions, figures, headlines, passports
from translation import sentences

MODES = "forward", "backward"
OURS, COPY = "triton", "copy"
UNIT = "% of copy"


def recordings(config):
    """{GPU: recording}: those that fit the page, if they are two or more."""
    name, found = config.compared_page, {}
    for gpu in recording.gpus(name, config.measured_gpu):
        with suppress(recording.RecordingError):
            found[gpu] = recording.load(gpu, name)
    return found if len(found) > 1 else {}


def benchmarks(recorded):
    """{pass: {GPU: benchmark}}: passes that all GPUs measured alike."""
    found = {}
    for mode in MODES:
        its = {gpu: _benchmark(data, mode) for gpu, data in recorded.items()}
        alike = [each and (each["args"], each["x_names"])
                 for each in its.values()]  # fmt: skip
        if its and all(each and each == alike[0] for each in alike):
            found[mode] = its
    return found


def _benchmark(data, mode):
    """The first that compares our speed in a pass, also with a copy."""
    for benchmark in data["benchmarks"].values():
        compares = headlines.compares(benchmark["unit"], benchmark["rows"])
        in_mode = benchmark["args"].get("mode") == mode
        if compares and in_mode and shares(benchmark):
            return benchmark
    return None


def shares(benchmark):
    """{size: our speed in % of the copy's} where both were measured."""
    medians = {OURS: {}, COPY: {}}
    for row in benchmark["rows"]:
        if row["provider"] in medians and row["median"]:
            x = recording.x_of(row, benchmark["x_names"])
            medians[row["provider"]][x] = row["median"]
    return {
        x: 100 * ours / medians[COPY][x]
        for x, ours in medians[OURS].items()
        if x in medians[COPY] and benchmark["unit"] == "GB/s"
    }


def measured(recorded):
    """The shares as what a figure shows, a provider for each pass and GPU;
    None if there is nothing to compare."""
    compared = benchmarks(recorded)
    if not compared:
        return None
    tables, names = {}, {}
    for mode, its in compared.items():
        for gpu, benchmark in its.items():
            line = f"{mode} {gpu}"
            tables[line] = shares(benchmark)
            names[line] = words.in_a_row(
                [_(headlines.PASSES[mode]), _gpu(recorded[gpu])], _
            )
    args, x_names = benchmark["args"], benchmark["x_names"]
    rows = [
        dict(zip(x_names, x, strict=True))
        | {"provider": line}
        | dict.fromkeys(recording.VALUES, table.get(x))
        for x in sorted({x for table in tables.values() for x in table})
        for line, table in tables.items()
    ]
    return Measured(
        name="shares-of-copy",
        gpu="",
        environment={},
        unit=UNIT,
        args={name: value for name, value in args.items() if name != "mode"},
        x_names=x_names,
        names=names,
        method=benchmark["method"],
        rows=rows,
    )


def _gpu(data):
    return data["environment"]["gpu"]


def draw(recorded):
    """The passes beside each other, a line for each GPU."""
    import matplotlib.pyplot as plt

    compared = benchmarks(recorded)
    style.begin()
    figure, panels = plt.subplots(
        1, len(compared), sharey=True, squeeze=False, figsize=(6.6, 3.6)
    )
    for axes, (mode, its) in zip(panels[0], compared.items(), strict=True):
        # A marker tells the lines apart without colors.
        for marker, benchmark in zip("os^D", its.values(), strict=False):
            table = shares(benchmark)
            axes.plot(
                [x[0] for x in table],
                list(table.values()),
                marker=marker,
                markersize=5,
            )
        axes.set_title(headlines.PASSES[mode], fontsize=12)
        axes.set_xlabel("N (columns)")
        axes.set_ylim(0, 115)
        axes.xaxis.get_major_locator().set_params(nbins=4)
    panels[0][0].set_ylabel(UNIT)
    figure.legend(
        panels[0][0].get_lines(),
        list(map(_gpu, recorded.values())),
        fontsize=11,
        ncols=2,
        loc="outside upper left",
    )
    pictures = style.svg(figure)
    plt.close(figure)
    return pictures


def picture_of(name):
    return f"shares_{tutorial.file_name(name)}"


def keep(app):
    """Draw the figure once, for all languages."""
    recorded = recordings(app.config) if CURRENT is ENGLISH else {}
    if benchmarks(recorded):
        picture = picture_of(app.config.compared_page)
        paths = figures.pictures(app.srcdir, picture)
        for path, text in zip(paths, draw(recorded), strict=True):
            path.write_text(text, encoding="utf-8")


class SharesOfCopy(SphinxDirective):
    def run(self):
        recorded = recordings(self.config)
        if not (found := measured(recorded)):
            return []
        said = text(self.config.compared_page, recorded, found)
        return self.parse_text_to_nodes(said)


def text(name, recorded, found):
    """The figure and its passport."""
    links = [
        passports.json_of(gpu, name, text=f"JSON, {_gpu(data)}")
        for gpu, data in recorded.items()
    ]
    passport = [
        ".. container:: passport",
        "",
        "   " + _origin(name, found),
        "",
        *(f"   :{gpu}: {said}" for gpu, said in _sources(recorded)),
        "   :" + _("Method") + f": {_(found.method)}",
        "",
        indent(passports.numbers(found, links), "   "),
    ]
    body = passports.image(picture_of(name), captions.alt_text(found))
    body += "\n".join(passport)
    return ".. container:: measured\n\n" + indent(body, "   ")


def _origin(name, found):
    caption = (
        _("Speed of our kernels over that of the copy on each GPU"),
        rst.escape(captions.circumstances(found)),
    )
    # Translators: of the figure of one page's kernels on several GPUs.
    return _("**%(caption)s.** Computed from the recordings of %(page)s.") % {
        "caption": words.in_a_row(caption, _),
        "page": f":doc:`/tutorials/{name}`",
    }


def _sources(recorded):
    """Each GPU with what ran on it, and when."""
    for gpu, benchmark in next(iter(benchmarks(recorded).values())).items():
        environment = recording.environment_of(recorded[gpu], benchmark)
        measured = Measured(
            name="",
            gpu=gpu,
            names={},
            **(benchmark | {"environment": environment}),
        )
        _name, versions = next(passports.circumstances(measured))
        title = _("%(title)s.") % {"title": versions}
        said = [title, *passports.when(environment)]
        yield rst.escape(environment["gpu"]), sentences.joined(said)


def setup(app):
    app.add_config_value("compared_page", "", "env", [str])
    app.add_directive("shares-of-copy", SharesOfCopy)
    # When Sphinx-Gallery has run the tutorials.
    app.connect("builder-inited", keep, priority=901)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
