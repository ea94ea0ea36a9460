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
    "while 256 MB of zeros pass": "the tensor of the clock",
    "copy of a matrix of 8 MB": "4096 × 1024 numbers of 16 bits",
    # Measured on 25 November 2026, 4096 × 1024, GB/s on the same input and on
    # sixteen in turns: the copy 3132 and 2315, the softmax 3118 and 2220.
    "1.3 times as fast when all calls had the same input": "an H100",
    "a softmax of two sweeps 1.4 times": "an H100",
    "A matrix of 8 MB that a kernel": "the same",
    "took 3 KB from memory": "dram__bytes_read on an H100, of 8.39 MB",
    "longer than 0.2 ms": "a replay of 0.3 ms, 0.1 of which overwrites",
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
} | {
    f"**Reading time:** about {minutes} minutes": "how long a page is"
    for minutes in range(5, 65, 5)
}
