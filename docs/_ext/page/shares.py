"""One page's kernels on several GPUs: ``.. shares-of-copy::``.

The figure shows their speed in % of that of the copy on the same GPU, a line
for each GPU, and its passport says how fast the copies are. All of it is
computed from the recordings of ``compared_page`` in conf.py. Where fewer than
two of them fit there is nothing to compare, and the directive says nothing.
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
from words_later import N_

MODES = "forward", "backward"
# The ceiling of a pass.
COPIES = {
    "forward": N_("Copy, forward"),
    "backward": N_("Copy, backward"),
}
OURS, COPY = "triton", "copy"
UNIT = "% of copy"


def recordings(name, default):
    """{GPU: recording}: those that fit the page, if they are two or more."""
    found = {}
    for gpu in recording.gpus(name, default):
        with suppress(recording.RecordingError):
            found[gpu] = recording.load(gpu, name)
    return found if len(found) > 1 else {}


def benchmarks(recorded):
    """{pass: {GPU: benchmark}}: passes that all GPUs measured alike."""
    found = {}
    for mode in MODES:
        its = {gpu: _benchmark(data, mode) for gpu, data in recorded.items()}
        if its and all(its.values()):
            found[mode] = its
    first = next((b for its in found.values() for b in its.values()), None)
    return {
        mode: its
        for mode, its in found.items()
        if all(_circumstances(b) == _circumstances(first)
               for b in its.values())
    }  # fmt: skip


def _circumstances(benchmark):
    args = {k: v for k, v in benchmark["args"].items() if k != "mode"}
    return args, benchmark["x_names"]


def _benchmark(data, mode):
    """The first that has our speed in a pass beside the copy's and a rival's,
    or None."""
    for benchmark in data["benchmarks"].values():
        if (
            benchmark["unit"] == "GB/s"
            and benchmark["args"].get("mode") == mode
            and headlines.compares(benchmark["unit"], benchmark["rows"])
            and speeds(benchmark)
        ):
            return benchmark
    return None


def speeds(benchmark):
    """{size: (our speed, the copy's)} where both were measured."""
    medians = {}
    for row in benchmark["rows"]:
        x = recording.x_of(row, benchmark["x_names"])
        medians[x, row["provider"]] = row["median"]
    sizes, _providers = recording.grid(benchmark)
    return {
        x: (medians[x, OURS], medians[x, COPY])
        for x in sizes
        if medians.get((x, OURS)) and medians.get((x, COPY))
    }


def shares(recorded):
    """Our speed in % of the copy's on the same GPU, as what a figure shows: a
    provider for each pass and GPU. None if there is nothing to compare."""
    compared = benchmarks(recorded)
    if not compared:
        return None
    tables = {
        (mode, gpu): speeds(benchmark)
        for mode, its in compared.items()
        for gpu, benchmark in its.items()
    }
    first = next(iter(next(iter(compared.values())).values()))
    args, x_names = _circumstances(first)
    rows = []
    for x in sorted({x for table in tables.values() for x in table}):
        size = dict(zip(x_names, x, strict=True))
        for (mode, gpu), table in tables.items():
            share = None
            if x in table:
                ours, copy = table[x]
                share = 100 * ours / copy
            values = dict.fromkeys(recording.VALUES, share)
            rows.append(size | {"provider": f"{mode} {gpu}"} | values)
    return Measured(
        name="shares-of-copy",
        gpu="",
        environment={},
        unit=UNIT,
        args=args,
        x_names=x_names,
        names={
            f"{mode} {gpu}": words.in_a_row(
                [_(headlines.PASSES[mode]), _gpu(recorded[gpu])], _
            )
            for mode, gpu in tables
        },
        method="",
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
            table = speeds(benchmark)
            axes.plot(
                [x[0] for x in table],
                [100 * ours / copy for ours, copy in table.values()],
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
        [_gpu(data) for data in recorded.values()],
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
    """Draw the figure once, for all languages. Its file of numbers is there in
    any case, so that Sphinx sees when there is something to show."""
    if CURRENT is not ENGLISH:
        return
    name = app.config.compared_page
    recorded = recordings(name, app.config.measured_gpu)
    picture = picture_of(name)
    found = shares(recorded)
    if found:
        for path, text in zip(
            figures.pictures(app.srcdir, picture), draw(recorded), strict=True
        ):
            write_changed(path, text)
    text = figures.text_of([found] if found else [])
    write_changed(figures.file_of(app.srcdir, picture), text)


def write_changed(path, text):
    """Write a file whose text is another: Sphinx looks at its time."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")


class SharesOfCopy(SphinxDirective):
    def run(self):
        name = self.config.compared_page
        file = figures.file_of(self.env.srcdir, picture_of(name))
        if not file.exists():
            return []
        self.env.note_dependency(str(file))
        recorded = recordings(name, self.config.measured_gpu)
        if not (found := shares(recorded)):
            return []
        for gpu in recorded:
            self.env.note_dependency(str(recording.path_of(gpu, name)))
        return self.parse_text_to_nodes(text(name, recorded, found))


def text(name, recorded, found):
    """The figure and its passport."""
    passport = [
        ".. container:: passport",
        "",
        "   " + _origin(name, found),
        "",
        *(f"   :{key}: {said}" for key, said in _sources(recorded)),
        "",
        indent(passports.numbers(found, _links(name, recorded)), "   "),
    ]
    body = passports.image(picture_of(name), captions.alt_text(found))
    body += "\n".join(passport)
    return ".. container:: measured\n\n" + indent(body, "   ")


def _origin(name, found):
    # Translators: of the figure of one page's kernels on several GPUs.
    return _("**%(caption)s.** Computed from the recordings of %(page)s.") % {
        "caption": words.in_a_row(
            [
                _("Speed of our kernels over that of the copy on each GPU"),
                rst.escape(captions.circumstances(found)),
            ],
            _,
        ),
        "page": f":doc:`/tutorials/{name}`",
    }


def _sources(recorded):
    """Each GPU with what ran on it; the speed of the copies; the clock."""
    compared = benchmarks(recorded)
    for gpu, data in recorded.items():
        first = next(iter(compared.values()))[gpu]
        environment = recording.environment_of(data, first)
        measured = Measured(
            name="",
            gpu=gpu,
            names={},
            **(first | {"environment": environment}),
        )
        _name, versions = next(passports.circumstances(measured))
        said = [
            _("%(title)s.") % {"title": versions},
            *passports.when(environment),
        ]
        yield rst.escape(environment["gpu"]), sentences.joined(said)
    for mode, its in compared.items():
        tables = {gpu: speeds(each) for gpu, each in its.items()}
        common = [
            x
            for x in next(iter(tables.values()))
            if all(x in table for table in tables.values())
        ]
        if not common:
            continue
        last = common[-1]
        speed = [
            _("%(speed)s GB/s on %(gpu)s")
            % {
                "speed": captions.number(table[last][1]),
                "gpu": rst.escape(_gpu(recorded[gpu])),
            }
            for gpu, table in tables.items()
        ]
        first = next(iter(its.values()))
        size = zip(first["x_names"], last, strict=True)
        at = words.in_a_row([f"{name} = {value}" for name, value in size], _)
        yield (
            _(COPIES[mode]),
            _("%(speeds)s at %(size)s")
            % {"speeds": words.in_a_row(speed, _), "size": at},
        )
    yield _("Method"), _(first["method"])


def _links(name, recorded):
    return [
        passports.json_of(gpu, name, text=f"JSON, {_gpu(data)}")
        for gpu, data in recorded.items()
    ]


def setup(app):
    app.add_config_value("compared_page", "", "env", [str])
    app.add_directive("shares-of-copy", SharesOfCopy)
    # When Sphinx-Gallery has run the tutorials.
    app.connect("builder-inited", keep, priority=901)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
