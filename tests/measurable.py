"""Tutorials that measure something on a GPU that a stand-in makes up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from project import Project

from measurements import recording

HERE = Path(__file__).parent

TUTORIAL = '''r"""
Multiply {name}
===============

Two benchmarks, and what may happen while they are measured.
"""

# %%
# The first cell.

import os
import sys
import time
from pathlib import Path

import torch
import triton.testing

ON_GPU = torch.cuda.is_available()
NAME = "{name}"


class NoGPU(Exception):
    """Raised where there is no GPU."""


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


# %%

# Drawing: a line.

Path(os.environ["TOLD"] + ".drawn").touch()

# %%
# Two benchmarks.


def tell(how, point):
    """Say to the test what is done to a point, and when."""
    line = how, NAME, point, time.time()
    with open(os.environ["TOLD"], "a") as file:
        file.write(" ".join(map(str, line)) + "\\n")


def sign(what):
    """Whether the test wants something to happen."""
    return Path(os.environ["TOLD"] + f".{{what}}-{{NAME}}").exists()


def benchmark(name):
    return triton.testing.perf_report(
        triton.testing.Benchmark(
            x_names=["N"],
            x_vals=[8, 16],
            line_arg="provider",
            line_vals=["triton", "torch", "copy"],
            line_names=["Triton", "PyTorch", "Copy"],
            ylabel="µs",
            plot_name=name,
            args={{"M": 1}},
        )
    )


def timed(function, N, provider):
    if not ON_GPU:
        raise NoGPU
    x = torch.rand(N)
    ms = triton.testing.do_bench(
        lambda: function(x), quantiles=[0.5, 0.2, 0.8]
    )
    point = f"{{function.__name__}}:{{N}}:{{provider}}"
    if ms[0] == 1:  # nothing was timed
        tell("compiled", point)
        return ms
    tell("timed", point)
    if function is triple and N == 16 and sign("disturb"):
        # In the test's file: how many calls are still disturbed.
        left = Path(os.environ["TOLD"] + f".disturb-{{NAME}}")
        count = int(left.read_text())
        if count:
            left.write_text(str(count - 1))
            return [ms[0], 0.8 * ms[0], 1.2 * ms[0]]
    while function is triple and sign("wait"):
        time.sleep(0.05)
    if function is triple and sign("fail"):
        raise ValueError("no luck")
    if function is triple and sign("exit"):
        sys.exit()
    if function is triple and sign("die"):
        os._exit(0)
    return ms


@benchmark("double")
def measure_double(M, N, provider):
    """By a stand-in for a clock."""
    return timed(double, N, provider)


@benchmark("triple")
def measure_triple(M, N, provider):
    """By a stand-in for a clock."""
    return timed(triple, N, provider)


def run(benchmark):
    try:
        return benchmark.run(show_plots=True, print_data=True, return_df=True)
    except NoGPU:
        print("Timing needs a GPU; recorded figures are on the page.")


table = run(measure_double)

# %%
# What the first says.

if table is not None:
    print("double:", table["Triton (µs)"].tolist())

# %%
# The second.

table = run(measure_triple)

# %%
# What it says.

if table is not None:
    print("triple:", table["Triton (µs)"].tolist())
'''

CHECKS = """
import os
from pathlib import Path

import pytest
import torch


def test_there_is_a_gpu():
    assert torch.cuda.is_available()

def test_nothing_is_wrong(pytestconfig):
    number = pytestconfig.getoption("--page")[:2]
    assert not Path(os.environ["TOLD"] + f".wrong-{number}").exists()


def test_that_this_machine_cannot_run():
    pytest.skip("as the sanitizer is on some machines")
"""
OPTION = """
def pytest_addoption(parser):
    parser.addoption("--page")
"""

GPU = "nvidia-stand-in-100"


class Measurable(Project):
    """A site with tutorials that can be measured, and none recorded."""

    def __init__(self, folder, names=("01-double",)):
        super().__init__(folder, ())
        self.told = self.root.parent / f"{self.root.name}.told"
        checks = self.root / "tests"
        checks.mkdir()
        (checks / "conftest.py").write_text(OPTION)
        (checks / "test_checks.py").write_text(CHECKS)
        for name in names:
            self.list(name)
            self.script(name).write_text(TUTORIAL.format(name=name[:2]))

    def env(self, gpus, **more):
        paths = [HERE / "stand_in"] if gpus else []
        env = {k: v for k, v in os.environ.items() if k not in UNSET}
        return env | {
            "TOLD": str(self.told),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PATH": os.pathsep.join(
                [str(HERE / "stand_in"), os.environ["PATH"]]
            ),
            "STAND_IN_GPUS": str(gpus),
            "NO_COLOR": "1",
            **more,
        }

    def start_record(self, *arguments, gpus=1):
        env = self.env(gpus)
        ext = str(self.root / "docs/_ext")
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], ext])
        return subprocess.Popen(
            [sys.executable, "-m", "measurements.record", *arguments],
            cwd=self.root,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Where the tests run in the background Ctrl+C may be ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def make_record(self, *arguments, gpus=1):
        """Run it to its end; (exit status, what it says)."""
        child = self.start_record(*arguments, gpus=gpus)
        said = child.communicate()[0]
        return child.returncode, said

    def build_on(self, gpus, figures="auto", **env):
        given = self.env(gpus, **env)
        return self.build(figures, **given)

    def sign(self, what, name="01"):
        """A file that makes the tutorial wait or fail, or its checks."""
        return self.told.with_name(f"{self.told.name}.{what}-{name}")

    def points(self, how="timed", name="01"):
        """What was done so far: (function:N:provider, when)."""
        text = self.told.read_text() if self.told.exists() else ""
        found = [line.split() for line in text.splitlines()]
        return [
            rest
            for how_, name_, *rest in found
            if how_ == how and name_ == name
        ]

    def forget(self):
        self.told.unlink(missing_ok=True)

    def recorded(self, name="01-double", store="docs/measurements"):
        """A recording that must be whole, or None."""
        store = self.root / store
        if not recording.path_of(GPU, name, store).exists():
            return None
        return recording.read(GPU, name, store)


UNSET = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "FIGURES")


def wait_for(child, condition):
    """Until something is true, while a process runs; the rest takes long
    where many run at a time."""
    while not condition():
        assert child.poll() is None, child.stdout.read()
        time.sleep(0.1)
