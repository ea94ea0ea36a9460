"""Run a script under compute-sanitizer, on a machine with a GPU."""

import os
import shutil
import subprocess
import sys

import pytest


def run(tool, script):
    """What the sanitizer and the script print; the script ends with "done".

    The script finds the tool's name in sys.argv[1].
    """
    path = shutil.which("compute-sanitizer")
    path = path or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if path is None:
        pytest.skip("compute-sanitizer is not installed")
    env = {
        **os.environ,
        # One allocation for each tensor: its end is the end of memory.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [path, "--tool", tool, "--error-exitcode", "3"]
    child = subprocess.run(
        [*command, sys.executable, "-c", script, tool],
        env=env,
        capture_output=True,
        text=True,
    )
    if "Device not supported" in child.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    assert "done" in child.stdout
    return child.stdout
