"""What this machine is: what a recording says that its numbers depend on."""

import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# How providers are called, in their first word, and what is installed then.
LIBRARIES = {
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "flash": "flash-attn",
    "apex": "apex",
    "cudnn": "nvidia-cudnn-frontend",
    "fla": "fla-core",
    "cce": "cut-cross-entropy",
    "cut": "cut-cross-entropy",
}


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


def libraries(benchmarks):
    """The versions of the libraries that were measured, by provider."""
    found = {}
    for benchmark in benchmarks:
        for row in benchmark["rows"]:
            word = re.split(r"[^a-z0-9]", row["provider"].lower())[0]
            if word not in LIBRARIES or row["median"] is None:
                continue
            versions = []
            try:
                name = LIBRARIES[word]
                versions.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                pass
            if word == "cudnn":
                versions.append(f"cuDNN {cudnn()}")
            if versions:
                found[row["provider"]] = ", ".join(versions)
    return found


def cudnn():
    """The version of the cuDNN that torch has: 91002 is 9.10.2."""
    import torch

    number = torch.backends.cudnn.version() or 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


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
