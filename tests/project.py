"""A small copy of the project, with tutorials of a few lines, to build."""

import os
import re
import shutil
from pathlib import Path

import builds

from measurements import code_hash, recording
from page import paths

ROOT = Path(__file__).resolve().parents[1]

TUTORIAL = '''r"""
Double {name}
=====================

Double a tensor, and see what a page is made of.
"""

# %%
# The kernel, in its shortest form.

import os

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, N: tl.constexpr):
    cols = tl.arange(0, N)
    tl.store(y_ptr + cols, 2 * tl.load(x_ptr + cols))  # a comment


def double(x):
    y = torch.empty_like(x)
    _double[(1,)](x, y, x.numel())
    return y


x = torch.rand(8)
y = double(x)
assert torch.equal(y, 2 * x)

# %%
# The benchmark. {prose}


class NoGPU(Exception):
    """Raised where there is no GPU."""


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8, 16],
        line_arg="provider",
        line_vals=["triton", "torch", "copy"],
        line_names=["Triton", "PyTorch", "Copy"],
        ylabel="GB/s",
        plot_name="double",
        args={{"M": 4096, "dtype": torch.float16, "mode": "forward"}},
    )
)
def measure(M, N, dtype, mode, provider):
    """Invented for a test."""
    if not ON_GPU:
        raise NoGPU
    x = torch.rand(N, device="cuda")
    return triton.testing.do_bench(lambda: double(x))


try:
    table = measure.run(show_plots=True, return_df=True)
except NoGPU:
    table = None
    print("Timing needs a GPU; recorded figures are on the page.")

# %%
# What it says.

if table is not None:
    print("rows:", table["Triton (GB/s)"].tolist())
'''


SECTION = """{title}
==================

What this section
is about.

.. tutorial-cards::

.. toctree::
   :hidden:
   :glob:

   [0-9][0-9]-*
"""


class Project:
    """The site's own conf.py and docs, with small tutorials, in a folder."""

    def __init__(self, folder, names=("01-double",)):
        self.root = Path(folder)
        shutil.copytree(
            ROOT / "docs",
            self.root / "docs",
            ignore=shutil.ignore_patterns(
                *("_build", "tutorials", "nvidia-*", "__pycache__"),
                "locale",
            ),
        )
        # Without the site's own tutorials, and what leads to them.
        link = re.compile(
            r":(?:doc|download|ref):`([^`<]*?)\s+<tutorials/\S+/[^`]*`"
        )
        for page in (self.root / "docs").glob("*.rst"):
            text = paths.PATH.sub("", page.read_text())
            page.write_text(link.sub(r"\1", text))
        shutil.copy(ROOT / "conf.py", self.root)
        (self.root / "tutorials").mkdir()
        index = (ROOT / "tutorials/index.rst").read_text()
        entries = re.compile(r"^   \S+/index\n|^   \[0-9\].*\n", re.MULTILINE)
        (self.root / "tutorials/index.rst").write_text(entries.sub("", index))
        for name in names:
            self.add(name)

    def add(self, name):
        """Write a tutorial, its recording, and its section."""
        self.list(name)
        self.script(name).write_text(self.tutorial(name))
        self.record(name)

    def list(self, name):
        """Let indexes lead to a tutorial, behind those that are there."""
        index = self.script(name).with_name("index.rst")
        section = name.rpartition("/")[0]
        if section and not index.exists():
            index.parent.mkdir()
            index.write_text(SECTION.format(title=f"About {section}"))
        above = self.root / "tutorials/index.rst"
        entry = f"   {section}/index\n" if section else "   [0-9][0-9]-*\n"
        text = above.read_text()
        above.write_text(text + entry * (entry not in text))

    @staticmethod
    def tutorial(name, prose=""):
        return TUTORIAL.format(name=name.removesuffix("-double"), prose=prose)

    def script(self, name="01-double"):
        return self.root / "tutorials" / f"{name}.py"

    def edit(self, old, new, name="01-double"):
        text = self.script(name).read_text()
        assert text.count(old) == 1, f"{old!r}: {text.count(old)} times"
        self.script(name).write_text(text.replace(old, new))

    def change(self, old, new, name="01-double"):
        """Edit a tutorial whose recording is of the new code."""
        self.edit(old, new, name)
        self.record(name)

    def recording(self, name="01-double", gpu="nvidia-h200"):
        return self.root / "docs/measurements" / gpu / f"{name}.json"

    def record(
        self, name="01-double", gpu="nvidia-h200", scale=1.0, **changes
    ):
        """Write a recording of invented numbers for a tutorial."""
        path = self.recording(name, gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = re.search(r'"mode": "(\w+)"', self.script(name).read_text())[1]
        environment = ENVIRONMENT | {"gpu": gpu.upper()}
        data = {
            "code": code_hash.of(self.script(name)),
            "environment": changes.pop("environment", environment),
        }
        benchmark = {
            "unit": "GB/s",
            "args": {"M": 4096, "dtype": "float16", "mode": mode},
            "method": "Invented for a test.",
            "x_names": ["N"],
            "rows": rows(scale),
        } | changes
        data = recording.sealed(data | {"benchmarks": {"double": benchmark}})
        path.write_text(recording.dump(data))

    def build(self, figures="recorded", **env):
        """Build the site; the finished process, its output in one text."""
        given = {"FIGURES": figures, "NO_COLOR": "1"} | env
        return builds.build(self.root, os.environ | given)

    def page(self, name="01-double"):
        return (self.root / "html/tutorials" / f"{name}.html").read_text()

    def executed(self, output):
        """How many tutorials a build executed that came to its end."""
        found = re.search(r"successfully executed (\d+) out of", output)
        return int(found[1]) if found else 0

    def began(self, output):
        """Whether a build began with a tutorial, wherever it stopped."""
        return "generating gallery for" in output


ENVIRONMENT = {
    "driver": "1.2.3",
    "cuda": "13.0",
    "torch": "2.0.0",
    "triton": "3.0.0",
    "python": "3.12.0",
    "date": "2026-01-02",
    "checks_passed": 7,
}


def rows(scale=1.0):
    speeds = {"triton": 1000.25, "torch": 750.5, "copy": 2000.0}
    return [
        {
            "N": n,
            "provider": provider,
            "median": speed * scale * n / 8,
            "low": speed * scale * n / 8 - 1,
            "high": speed * scale * n / 8 + 1,
        }
        for n in (8, 16)
        for provider, speed in speeds.items()
    ]
