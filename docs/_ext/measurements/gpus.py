"""The GPUs of this machine, and how many of them a page is measured with."""

import ast
import os
import sys
from pathlib import Path

from measurements import recording

# Files of the drivers through which torch may find a GPU: NVIDIA's (also on
# Jetson), AMD's, and that of WSL.
NODES = "nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg"


def there():
    """Whether something can be measured here, as torch says.

    To import it takes seconds: not where no GPU can be behind its answer.
    """
    if "torch" not in sys.modules and not any(
        found for name in NODES for found in Path("/dev").glob(name)
    ):
        return False
    import torch

    return torch.cuda.is_available()


def none():
    """That there is no GPU, and what hides them if something does."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f" (CUDA_VISIBLE_DEVICES is {asked})" if asked else ""
    return f"torch finds no GPU here{why}"


def folder():
    """The name of this machine's GPU as recordings have it."""
    import torch

    return recording.slug(torch.cuda.get_device_name())


def count():
    import torch

    return torch.cuda.device_count() if there() else 0


def needed(script):
    """How many GPUs a script is measured with at a time, at least: its text
    says ``ranks=2`` or ``"ranks": 2``, and ``["ranks"]`` is some of them."""
    found = [1]
    for node in ast.walk(ast.parse(Path(script).read_text(encoding="utf-8"))):
        said = []
        if isinstance(node, ast.keyword):
            said = [(node.arg, node.value)]
        elif isinstance(node, ast.Dict):
            said = [
                (getattr(key, "value", None), value)
                for key, value in zip(node.keys, node.values, strict=True)
            ]
        elif isinstance(node, ast.List) and len(node.elts) == 1:
            said = [(getattr(node.elts[0], "value", None), ast.Constant(2))]
        for key, value in said:
            number = getattr(value, "value", None)
            if key == "ranks" and isinstance(number, int):
                found.append(number)
    return max(found)


def lacking(script):
    """How many more GPUs than are here a script is measured with."""
    return max(needed(script) - max(count(), 1), 0)
