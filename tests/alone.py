"""A tutorial as its reader runs it: an empty folder, four packages, no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tutorial import TUTORIALS

GATE = Path(__file__).with_name("four_packages.py")
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
# A script sets the switch to the interpreter itself.
HIDDEN = ("TRITON_INTERPRET", "PYTHONPATH")


def run_script(folder, name):
    env = {k: v for k, v in os.environ.items() if k not in HIDDEN}
    return subprocess.run(
        [sys.executable, GATE, name],
        cwd=folder,
        capture_output=True,
        text=True,
        env=env | NO_GPU,
    )


def run_tutorial(folder, name):
    """What a tutorial prints; it leaves no file."""
    script = shutil.copy(TUTORIALS / f"{name}.py", folder)
    done = run_script(folder, Path(script).name)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 active drivers" not in done.stdout + done.stderr
    assert os.listdir(folder) == [Path(script).name]
    return done.stdout
