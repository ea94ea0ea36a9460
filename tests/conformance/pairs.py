"""A table in which every value of one axis meets every value of each other.

Faults nearly always need one or two conditions together. All pairs fit into
about as many rows as the two longest axes have pairs.
"""

import itertools
import random


def table(axes, possible=lambda row: True):
    """Rows, each a dict: axis -> value. Pairs no possible row has are left
    out. The same axes give the same rows."""
    dice = random.Random(0)
    indices = {axis: range(len(values)) for axis, values in axes.items()}
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(axes, 2)
        for i in indices[a]
        for j in indices[b]
    }
    waiting = sorted(left, key=str)
    dice.shuffle(waiting)
    rows = []
    for pair in waiting:
        if pair not in left:
            continue
        for _ in range(20):
            chosen = _row(axes, dict(pair), left, dice)
            row = {axis: axes[axis][i] for axis, i in chosen.items()}
            if possible(row):
                left -= set(itertools.combinations(chosen.items(), 2))
                rows.append(row)
                break
    return rows


def _row(axes, chosen, left, dice):
    """The pair, and of each other axis the value that meets most anew."""
    order = [axis for axis in axes if axis not in chosen]
    dice.shuffle(order)
    place = {axis: number for number, axis in enumerate(axes)}
    for axis in order:

        def meets(i, axis=axis):
            mine = axis, i
            return sum(
                ((mine, other) if place[axis] < place[other[0]]
                 else (other, mine)) in left
                for other in chosen.items()
            )  # fmt: skip

        chosen[axis] = max(
            range(len(axes[axis])), key=lambda i: (meets(i), dice.random())
        )
    return {axis: chosen[axis] for axis in axes}
