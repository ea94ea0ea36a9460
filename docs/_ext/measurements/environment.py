"""What this machine is: what a recording says that its numbers depend on."""

import os
import platform
import re
import subprocess
import time
from pathlib import Path


def here(checks_passed):
    """Where, when and with what something is measured now."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "checks_passed": checks_passed,
    }


def driver():
    file = Path("/proc/driver/nvidia/version")
    said = file.read_text() if file.exists() else ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", said)
    if not found:
        said = nvidia_smi(
            "--query-gpu=driver_version", "--format=csv,noheader"
        )
        found = re.match(r"\S.*", said)
    return found[0] if found else "unknown"


def nvidia_smi(*arguments):
    """What it says; nothing where it is not there."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def linked(count):
    """The same of the first GPUs that this process sees, which are measured
    together: numbers say little of others that are linked otherwise."""
    import torch

    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "link": link(count),
        "nccl": nccl(),
    }


def link(count):
    """How the GPUs are linked, in the words of nvidia-smi: NV18, PHB."""
    said = nvidia_smi("topo", "-m")
    table = [line.split() for line in said.splitlines() if line[:3] == "GPU"]
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not all(key.strip().isdigit() for key in given):
        given = range(count)
    at = [int(key) for key in given][:count]
    try:
        kinds = {table[a][1 + b] for a in at for b in at if a < b}
    except IndexError:
        return "unknown"
    return " and ".join(sorted(kinds)) or "unknown"


def nccl():
    """The version of NCCL, and the settings that it reads."""
    import torch

    version = ".".join(map(str, torch.cuda.nccl.version()))
    given = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NCCL_") and name != "NCCL_DEBUG"
    )
    return " ".join([version, *given])
