"""Strategies of hypothesis for the cases that every norm must pass."""

import hypothesis
from hypothesis import strategies as st

from layer_norm_cases import DTYPES, LAYOUTS, Case, wrong_in_interpreter

TRIED = hypothesis.settings.get_profile("same").max_examples


def examples(count):
    """So many where make test tries TRIED; in test-all as many times more."""
    most = hypothesis.settings().max_examples
    return hypothesis.settings(max_examples=count * most // TRIED)


layouts = st.sampled_from(list(LAYOUTS))
own_layouts = layouts.filter(lambda name: name != "one number")


def shapes(most, dimensions):
    """Normalized shapes."""
    sizes = st.lists(st.integers(1, most), min_size=1, max_size=dimensions)
    return sizes.map(tuple)


def any_case(kind, **fields):
    """A case of this class; fields are those that not every norm has."""
    common = {
        "lead": st.lists(st.integers(0, 5), max_size=3).map(tuple),
        "shape": shapes(13, 3),
        "dtype": st.sampled_from(DTYPES),
        "weight_dtype": st.sampled_from([None, *DTYPES]),
        "x": own_layouts,
        "dy": layouts,
        "parameters": own_layouts,
        "weight": st.booleans(),
    }
    return st.builds(kind, **common | fields).filter(
        lambda case: not wrong_in_interpreter(case.dtype, case.weight_dtype)
    )


def any_layer_norm(**fields):
    return any_case(
        Case,
        bias=st.booleans(),
        wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        eps=st.sampled_from([1e-12, 1e-5, 0.1]),
        **fields,
    )
