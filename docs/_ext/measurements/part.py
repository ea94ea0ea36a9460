"""The part of a tutorial that its benchmarks need: what is run to measure.

It is what the hashes of the benchmarks cover (`reach`), and the statements
that run them. Checks, drawings and exercises are left out: they take longer
than what they stand beside, and every build runs them.
"""

import ast

from measurements.benchmarks import made_by
from measurements.reach import FUNCTIONS, Script


def of(text, plots):
    """A syntax tree of what is needed to run some benchmarks, in order.

    Line numbers stay, so Triton and tracebacks find the source.
    """
    script = Script(text)
    made = made_by(script)
    needed = set()
    for plot in plots:
        for node in _running(script, made[plot]):
            needed |= {node, *script.reached(node)}
    script.tree.body = [node for node in script.body if node in needed]
    return script.tree


def _running(script, root):
    """The statements that run a benchmark, from what makes it."""
    for node, its in zip(script.body, script.names, strict=True):
        if isinstance(root, FUNCTIONS):  # decorated, and run below by its name
            if node is not root and root.name in its.used_now:
                yield node
        elif any(part is root for part in ast.walk(node)):
            yield node
