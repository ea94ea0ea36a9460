"""GPUs that are measured together: which, how they are linked, by which NCCL.

Numbers of one machine say little of another whose GPUs are linked otherwise.
"""

import os
import subprocess


def environment(count):
    """What a recording says of the first GPUs that this process sees."""
    import torch

    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "link": link(count),
        "nccl": nccl(),
    }


def nccl():
    """Its version, and the settings that it reads."""
    import torch

    version = ".".join(map(str, torch.cuda.nccl.version()))
    given = sorted(f"{k}={v}" for k, v in os.environ.items() if _setting(k))
    return " ".join([version, *given])


def _setting(name):
    return name.startswith("NCCL_") and name != "NCCL_DEBUG"


def link(count):
    """How the GPUs are linked, in the words of nvidia-smi: NV18, PHB."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
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
