"""Numbers with a unit in what is no page: README, docs, sections.

``docs/_ext/measurements/claims.py`` explains CLAIMS and FACTS.
"""

from measurements import spread

FACTS = {
    f"at most {spread.MOST:.0%} of the median apart": "what is refused",
    "above 102% of their copy": "what tests/test_clock.py asks about",
    "above 1 × ours are faster": "how to read the lines below",
}

# In any text of the site.
EVERYWHERE = {
    text: "the quantiles that a clock returns beside the median"
    for text in (
        "20 % and 80 % quantiles",
        "20% and 80% quantiles",
        "median, 20 %, 80 %",
    )
} | {
    f"**Reading time:** about {minutes} minutes": "how long a page is"
    for minutes in range(5, 65, 5)
}
