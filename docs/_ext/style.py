"""One look for every figure: colors, lines, and a light and a dark form.

Figures are drawn once, in the colors of the light form. The dark form is the
same drawing with each color exchanged for its partner, so a tutorial's script
needs to know nothing of either.
"""

import io

from words_later import N_

# Light and dark partners. The series are told apart by colour-blind readers
# (after Okabe and Ito); each has at least 3:1 contrast on its background.
PALETTE = {
    "ink": ("#1f2328", "#e6e8eb"),
    "faint": ("#d5d9de", "#3d434b"),
    "blue": ("#0069b4", "#5cb8ff"),
    "vermilion": ("#c2410c", "#ff9466"),
    "green": ("#00795a", "#3fd6a8"),
    "purple": ("#9a3f83", "#f09ad6"),
    "amber": ("#9a6b00", "#f2c44d"),
    "sky": ("#2f86a6", "#9fe0f5"),
    "grey": ("#6b7280", "#a5acb8"),
    "olive": ("#617300", "#b9d136"),
    "indigo": ("#4a3fb8", "#a897ff"),
}
LIGHT = {name: pair[0] for name, pair in PALETTE.items()}
# What scripts may say in plain matplotlib, and its dark partner.
PLAIN = {"#000000": PALETTE["ink"][1], "#ffffff": "#14181e"}

SERIES = ["blue", "vermilion", "green", "purple", "amber", "sky", "grey"]

# The look of the lines that every benchmark may have.
LINES = {
    "triton": ("Triton", "blue", "-"),
    "torch": ("PyTorch", "vermilion", "-"),
    "torch.compile": ("torch.compile", "amber", "-"),
    "liger": ("Liger", "green", "-"),
    "apex": ("Apex", "purple", "-"),
    "quack": ("quack", "sky", "-."),
    "flash": ("flash-attn", "grey", "-"),
    "cudnn": ("cuDNN", "olive", "-"),
    "fla": ("fla", "indigo", "-."),
    "liger float32": (N_("Liger, float32 sums"), "green", ":"),
    "cce": ("Cut Cross-Entropy", "purple", "-"),
    "torch chunks": (N_("PyTorch, chunks"), "vermilion", ":"),
    "sdpa-cudnn": ("cuDNN, by PyTorch", "olive", "-"),
    "flex": ("FlexAttention", "purple", "-"),
    # Ours, and torch.compile, when the host has nothing to do.
    "CUDA graph": ("CUDA graph", "blue", ":"),
    "reduce-overhead": ("reduce-overhead", "amber", ":"),
    "copy": ("Copy", "ink", "--"),
    "cublas": ("A product of matrices", "ink", "--"),
}
# Peers that a machine may lack: drawn when they were recorded.
OPTIONAL = (
    *("liger", "apex", "quack", "flash", "cudnn", "fla"),
    *("liger float32", "cce", "torch chunks"),
)
# Letters of a name, if three stand beside each other in a legend.
WIDEST_OF_THREE = 20
# Whoever is no kernel of ours and no ceiling: who a page has to beat.
NO_RIVALS = ("triton", "CUDA graph", "copy", "cublas")
RIVALS = {
    provider: name
    for provider, (name, _, _) in LINES.items()
    if provider not in NO_RIVALS
}


def begin():
    """Give matplotlib this look, and nothing that a script has set before."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")  # which draws into no window
    plt.rcdefaults()
    plt.rcParams.update(rc_params())


def rc_params():
    """The settings of matplotlib that make this look."""
    from cycler import cycler

    ink, faint = LIGHT["ink"], LIGHT["faint"]
    return {
        "figure.figsize": (6.6, 4.2),
        "figure.constrained_layout.use": True,
        "font.family": "DejaVu Sans",
        "font.size": 12,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "axes.titlecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": faint,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=[LIGHT[name] for name in SERIES]),
        "savefig.transparent": True,
    }


def spelled(provider, name):
    """The name of a line, in the capitals of LINES if it is the same."""
    known = LINES.get(provider, [name])[0]
    return known if name.lower() == known.lower() else name


def dressed(bench):
    """The lines of a benchmark in this look, as its ``styles``."""
    taken = {LINES[p][1] for p in bench.line_vals if p in LINES} | {"blue"}
    free = [name for name in SERIES if name not in taken]
    # A tutorial's own lines, such as the rungs of a ladder: each color once,
    # then each again with another line.
    own = iter([(c, "-") for c in free] + [(c, ":") for c in free])
    styles = []
    for provider in bench.line_vals:
        if provider in LINES:
            _, color, line = LINES[provider]
        else:
            color, line = next(own, ("grey", ":"))
        styles.append((LIGHT[color], line))
    return styles


def finish(figure, bench):
    """What Triton's plot lacks: names without units, an axis from zero."""
    axes = figure.axes[0]
    lines = axes.get_lines()
    if all(isinstance(x, str) for x in bench.x_vals):
        _as_points(axes, lines, bench.x_vals)
    if not bench.y_log:
        top = axes.get_ylim()[1]
        axes.set_ylim(0, top * 1.12)
        _show_zeros(lines)
    if axes.get_xscale() == "linear" and _whole(bench.x_vals):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_xscale() == "log" and _powers_of_two(bench.x_vals):
        axes.set_xscale("log", base=2)
    if not bench.xlabel and bench.x_names[0] == "N":
        axes.set_xlabel("N (columns)")
    for provider, line in zip(bench.line_vals, lines, strict=True):
        # A line at 0 lies on the axis, not under it; ours lies on top.
        level = {"copy": 1, "cublas": 1, "triton": 4}.get(provider, 3)
        line.set(clip_on=False, zorder=level)
        if any(y != y for y in line.get_ydata()):  # points between gaps
            line.set(marker="o", markersize=4)
    if axes.get_legend():
        axes.get_legend().remove()
    # Beside the axes it hides no line.
    names = bench.line_names
    columns = 3 if max(map(len, names)) <= WIDEST_OF_THREE else 2
    figure.legend(
        lines, names, fontsize=11, ncols=columns, loc="outside upper left"
    )


def _whole(values):
    return all(isinstance(value, int) for value in values)


def _powers_of_two(values):
    return _whole(values) and all(value & (value - 1) == 0 for value in values)


def _show_zeros(lines):
    """Lines that are 0 everywhere cover each other: rings around rings."""
    zeros = [line for line in lines if not any(line.get_ydata())]
    for size, line in enumerate(reversed(zeros)):
        line.set(marker="o", markersize=5 + 5 * size, markerfacecolor="none")


def _as_points(axes, lines, names):
    """Nothing lies between two names: points instead of lines."""
    for line, marker in zip(lines, "o+x^sdv*", strict=False):
        line.set(linestyle="none", marker=marker, markersize=9)
        if marker == "o":
            line.set(markerfacecolor="none", markeredgewidth=1.8)
    _hide_bands(axes)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")


def social(figure, title, caption):
    """A figure under its title as a PNG of 1200 by 630, for shared links."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    size = figure.get_size_inches()
    _resize(figure, 8, 3.5)
    plot = io.BytesIO()
    figure.savefig(plot, format="png", dpi=150, transparent=False)
    _resize(figure, *size)
    card = Figure((8, 4.2), dpi=150, facecolor="white")
    card.figimage(imread(io.BytesIO(plot.getvalue())))
    card.text(0.02, 0.92, title, size=17, weight="bold")
    card.text(0.02, 0.86, caption, size=11)
    picture = io.BytesIO()
    card.savefig(picture, format="png", transparent=False)
    return picture.getvalue()


def for_a_card(figure):
    """Give a figure the form for a card, a third of a page wide: smaller, with
    words of the same size, and without quantiles."""
    from matplotlib.ticker import MaxNLocator

    _resize(figure, 4.4, 3.3)
    for legend in list(figure.legends):
        lines = legend.legend_handles
        names = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        figure.legend(
            lines, names, fontsize=11, ncols=2, loc="outside upper left",
            columnspacing=1, handlelength=1.5, borderaxespad=0,
        )  # fmt: skip
    for axes in figure.axes:
        _hide_bands(axes)
        ticks = axes.xaxis.get_major_locator()
        if isinstance(ticks, MaxNLocator):
            ticks.set_params(nbins=5)


def _resize(figure, width, height):
    figure.set_size_inches(width, height)
    figure.set_layout_engine("constrained")


def _hide_bands(axes):
    for band in axes.collections:
        band.set_visible(False)


def outlined(figure):
    """Leave only the lines of a figure, for a picture as small as a word."""
    _resize(figure, 1.6, 0.9)
    for legend in list(figure.legends):
        legend.remove()
    for axes in figure.axes:
        axes.set(xlabel="", ylabel="", title="")
        axes.grid(False)
        axes.tick_params(
            which="both", length=0, labelbottom=False, labelleft=False
        )
        for spine in axes.spines.values():
            spine.set_color(LIGHT["faint"])
        _hide_bands(axes)
        for line in axes.get_lines():
            line.set_linewidth(1.4)


def svg(figure):
    """A figure as two SVG texts: its light and its dark form.

    Drawn again it is the same: all stays at the place that it has.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "both-passes"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")
    light = buffer.getvalue()
    dark = light
    for pair in PALETTE.values():
        dark = dark.replace(*pair)
    for color, partner in PLAIN.items():
        dark = dark.replace(color, partner)
    # A shape with no fill of its own is black: give it the dark form's ink.
    ink = PALETTE["ink"][1]
    dark = dark.replace("<svg ", f'<svg fill="{ink}" ', 1)
    return light, dark
