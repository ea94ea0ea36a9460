"""The notebook of a tutorial: its script as Sphinx-Gallery converts it, behind
cells of our own.

The first says where it comes from, the second makes ready: it installs what
is missing, says which GPU there is, and lets figures go on where there is
nothing to draw or too little memory.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urljoin

from sphinx.locale import _
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from page import solutions

# A link of a page to another one, as Sphinx-Gallery writes it.
TO_A_PAGE = re.compile(r"\[([^]]*)\]\(((?![a-z]+:)[^()\s]+\.html[^()\s]*)\)")
# Colab opens a notebook on a machine of this kind.
COLAB = {"accelerator": "GPU", "colab": {"gpuType": "T4", "provenance": []}}
# Words that it prints come from the catalogs.
READY = """
import gc
import importlib.util
import os


def install_what_is_missing(packages):
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if missing:
        install = "install --quiet " + " ".join(missing)
        get_ipython().run_line_magic("pip", install)


def say_which_gpu():
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        print(f"GPU: {gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        print(%(no_gpu)r)


# %(no_chart)s
def close_empty_charts():
    import matplotlib.pyplot as plt

    for number in plt.get_fignums():
        axes = plt.figure(number).axes
        lines = [line.get_ydata() for ax in axes for line in ax.lines]
        if lines and all(y != y for line in lines for y in line):  # NaN
            plt.close(number)


# %(gap)s
def leave_gaps(run):
    def run_with_gaps(benchmark, *args, **options):
        measure = benchmark.fn

        def measure_or_leave_a_gap(**point):
            try:
                return measure(**point)
            except Exception as error:
                if not is_lack_of_memory(error):
                    raise
            # Here the error is gone, and with it all that it kept.
            gc.collect()
            torch.cuda.empty_cache()
            print(%(no_memory)r, point)
            return 3 * [float("nan")]

        benchmark.fn = measure_or_leave_a_gap
        try:
            return run(benchmark, *args, **options)
        finally:
            benchmark.fn = measure

    return run_with_gaps


def is_lack_of_memory(error):
    lacks = torch.cuda.OutOfMemoryError, triton.runtime.errors.OutOfResources
    while error and not isinstance(error, lacks):
        error = error.__cause__ or error.__context__
    return bool(error)


install_what_is_missing(%(packages)r)

import torch

say_which_gpu()

import triton.testing

triton.testing.Mark.run = leave_gaps(triton.testing.Mark.run)
get_ipython().events.callbacks["post_execute"].insert(0, close_empty_charts)
"""


def of(script, origin, address, packages, gallery_conf, module=None):
    """The notebook of a script; ``origin`` is said first, and links lead to
    other pages of the site if that has an address. It writes the module that
    the script imports, if there is one."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "script.py")
        file.write_text(script, encoding="utf-8")
        blocks = split_code_and_text_blocks(file)[1]
    settings = gallery_conf | {"first_notebook_cell": ready(packages)}
    made = jupyter_notebook(blocks, settings, str(tutorial.MADE))
    solutions.hide_code(made["cells"][0])
    for cell in made["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            cell["source"] = [TO_A_PAGE.sub(to_the_site(address), text)]
        solutions.hide_in_notebook(cell)
    colab = _("In Colab: Runtime > Change runtime type > GPU.")
    first = {
        "cell_type": "markdown",
        "metadata": {},
        "source": ["  \n".join([*origin, colab])],  # a line for each
    }
    made["cells"].insert(0, first)
    if module:
        made["cells"].insert(2, with_module(module))
    made["metadata"] |= COLAB
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def with_module(module):
    """A cell that writes a module beside the notebook; its code is folded."""
    text = module.read_text(encoding="utf-8")
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": [f"%%writefile {module.name}\n{text}"],
    }
    solutions.hide_code(cell)
    return cell


def to_the_site(address):
    """Of a link: its words and where it leads, or its words alone."""

    def link(found):
        words, there = found.groups()
        return f"[{words}]({urljoin(address, there)})" if address else words

    return link


def ready(packages):
    """The cell that runs first; its code is folded."""
    title = _("Install what is missing, and say which GPU there is")
    code = READY % {
        "packages": packages,
        "no_chart": _("Where nothing was measured, no chart is drawn."),
        "gap": _("Where memory is too small, a figure has a gap."),
        "no_gpu": _("No GPU: Triton interprets the kernels, without timings."),
        "no_memory": _("Too little memory, so the figure has a gap:"),
    }
    return f"# @title {title}\n{code}"
