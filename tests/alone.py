"""A tutorial as its reader runs it: an empty folder, four packages, no GPU."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tutorial import TUTORIALS, beside

GATE = Path(__file__).with_name("four_packages.py")
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
# A script sets the switch to the interpreter itself.
HIDDEN = ("TRITON_INTERPRET", "PYTHONPATH")


@functools.cache
def gate():
    """What runs scripts, each in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k not in HIDDEN}
    return subprocess.Popen(
        [sys.executable, GATE],
        env=env | NO_GPU,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_script(script):
    """A script that has run in its folder."""
    print(script, file=gate().stdin, flush=True)
    status = int(gate().stdout.readline())
    said = (script.parent.with_suffix(end) for end in (".out", ".err"))
    return subprocess.CompletedProcess(
        script, status, *(file.read_text() for file in said)
    )


def run_tutorial(folder, name):
    """What a tutorial prints; it leaves no file."""
    script = Path(shutil.copy(TUTORIALS / f"{name}.py", folder))
    there = {script.name}
    if module := beside(name):
        there.add(Path(shutil.copy(module, folder)).name)
    done = run_script(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 active drivers" not in done.stdout + done.stderr
    assert {*os.listdir(folder)} - {"__pycache__"} == there
    return done.stdout
