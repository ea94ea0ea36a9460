"""Numbers with a unit in what is no page: README, docs, sections.

``docs/_ext/measurements/claims.py`` explains CLAIMS and FACTS.
"""

from measurements import spread

FACTS = {
    f"at most {spread.MOST:.0%} of the median apart": "what is refused",
    "above 102% of their copy": "what tests/test_clock.py asks about",
    "that of an H100 moves 3.35 TB/s, and that of an H200 4.8 TB/s": (
        "NVIDIA's data sheets of both"
    ),
    "above 1 × ours are faster": "how to read the lines below",
    "moves 3.35 TB/s, and that of an H200 4.8 TB/s": "by the data sheets",
}

# In any text of the site.
EVERYWHERE = {
    text: "the quantiles that a clock returns beside the median"
    for text in (
        "20 % and 80 % quantiles",
        "20% and 80% quantiles",
        "median, 20 %, 80 %",
    )
}
