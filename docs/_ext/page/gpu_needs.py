"""What a page says of the GPUs that it needs.

Nobody has tried it on all of them: it is what the compiler made of the page's
kernels, in the sizes and the type of its X-ray panels. How much memory its
figures need follows from the sizes that were measured.
"""

import math

from sphinx.locale import _

import tutorial
import words_later as words
from compiled import aot, declared, kept
from measurements import gpus
from page import figures
from translation import sentences
from words_later import AND

# GPUs for which the same is compiled.
ALIKE = {"sm_90": "H100/H200"}


# Bytes of an element, by the types that benchmarks name.
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
LARGE = 1e9  # bytes of a matrix; any GPU has room for a few smaller ones


def said(srcdir, name):
    """A line for the page of a tutorial, or "" if it declares no kernels."""
    if not (page := declared.kernels(name)):
        return ""
    compiled = kept.compiled_for(name) if page.kernels else {}
    yes, no = (
        [label(target) for target, does in compiled.items() if does is which]
        for which in (True, False)
    )
    count = gpus.needed(tutorial.script_of(name))
    size = largest_matrix(figures.of_page(srcdir, name))
    return sentences.joined(
        [
            _("The kernels compile for %(gpus)s.") % {"gpus": listed(yes)}
            if yes
            else "",
            _("They do not for %(gpus)s.") % {"gpus": listed(no)}
            if no
            else "",
            _("Timings need %(count)s GPUs at a time.") % {"count": count}
            if count > 1
            else "",
            _("Figures need room for several matrices of up to %(size)s GB.")
            % {"size": f"{size / 1e9:.1f}"}
            if size > LARGE
            else "",
        ]
    )


def largest_matrix(measured):
    """Bytes of the largest (M, N) of some benchmarks, where they say both."""
    sizes = [0]
    for each in measured:
        for row in each.rows:
            given = each.args | row
            shape = [given.get(name) for name in ("M", "N")]
            numbers = all(isinstance(each, int) for each in shape)
            if numbers and given.get("dtype") in BYTES:
                sizes.append(math.prod(shape) * BYTES[given["dtype"]])
    return max(sizes)


def label(target):
    _vendor, name = aot.DEVICES[target][0].split()
    gpu = ALIKE.get(target, name)
    return f"{gpu} ({target})"


def listed(labels):
    *some, last = labels
    if not some:
        return last
    both = words.listed([words.in_a_row(some, _), last], AND)
    return words.said(both, _)
