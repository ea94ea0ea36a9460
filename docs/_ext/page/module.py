"""What a page defines, as a module that others import: every_width.py.

What is taken of the page, modules.py says. A module that the script of a page
imports stands beside that: make cells has written it.
"""

from dataclasses import dataclass
from pathlib import Path

import modules
import tutorial
from modules import IN_ONE_PROCESS
from page import downloads


@dataclass(frozen=True)
class Module:
    about: str  # how it begins
    wanted: str  # the functions that it is for


MODULES = {
    "layer-norm/11-every-width": Module(
        f'''"""Layer norm of any width in Triton, forward and backward.

    layer_norm(x, normalized_shape, weight, bias)  as torch's function
    LayerNorm(normalized_shape)                    as torch.nn.LayerNorm
    swap(model)                                    every torch.nn.LayerNorm

{IN_ONE_PROCESS}
"""
''',
        "layer_norm LayerNorm swap",
    ),
    "attention/03-any-attention": Module(
        f'''"""Attention of any lengths in Triton, forward and backward.

    attention(query, key, value, is_causal, scale, enable_gqa)

as torch's scaled_dot_product_attention, without a mask and without dropout.

{IN_ONE_PROCESS}
"""
''',
        "attention",
    ),
    "attention/07-programs-that-stay": Module(
        f'''"""Attention, fast on Hopper GPUs, forward and backward.

    attention(query, key, value, is_causal, scale, enable_gqa)

as torch's scaled_dot_product_attention, without a mask and without dropout.

{IN_ONE_PROCESS}
"""
''',
        "attention",
    ),
}


def text(page):
    """The module, without the head of downloads."""
    if made := tutorial.beside(page):
        return made.read_text(encoding="utf-8")
    its = MODULES[page]
    return modules.text(its.about, {page: ("", its.wanted)}, tutorial.source)


def write(app, error):
    """Beside its page, in each language."""
    if error is not None or app.builder.format != "html":
        return
    for page, name in downloads.MODULES.items():
        if f"tutorials/{page}" not in app.env.found_docs:
            continue
        said = downloads.module_head(page, app.config)
        file = (Path(app.outdir) / "tutorials" / page).with_name(name)
        file.write_text(said + text(page), encoding="utf-8")


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
