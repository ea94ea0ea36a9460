"""What a page says of the GPUs that it needs.

Nobody has tried it on all of them: it is what the compiler made of the page's
kernels, in the sizes and the type of its X-ray panels.
"""

from sphinx.locale import _

import tutorial
import words_later as words
from compiled import aot, declared, kept
from measurements import gpus
from translation import sentences
from words_later import AND

# GPUs for which the same is compiled.
ALIKE = {"sm_90": "NVIDIA H100, NVIDIA H200"}


def said(name):
    """A line for the page of a tutorial, or "" if it declares no kernels."""
    if not declared.kernels(name):
        return ""
    compiled = kept.compiled_for(name)
    yes, no = (
        [label(target) for target, does in compiled.items() if does is which]
        for which in (True, False)
    )
    count = gpus.needed(tutorial.script_of(name))
    return sentences.joined(
        [
            _("The kernels compile for %(gpus)s.") % {"gpus": listed(yes)},
            _("They do not for %(gpus)s.") % {"gpus": listed(no)}
            if no
            else "",
            _("Timings need %(count)s GPUs at a time.") % {"count": count}
            if count > 1
            else "",
        ]
    )


def label(target):
    gpu = ALIKE.get(target, aot.DEVICES[target][0])
    return f"{gpu} ({target})"


def listed(labels):
    *some, last = labels
    if not some:
        return last
    both = words.listed([words.in_a_row(some, _), last], AND)
    return words.said(both, _)
