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
    "There is none, in any language: ``20%``": "how a percentage is written",
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

# The glossary. What it has measured, on an H100 80GB HBM3 at 1980 MHz, stands
# in no recording: the glossary says how each was measured.
L1, L2, DRAM = 26, 153, 362  # ns: a warp follows a chain of 16 KB, 8 MB, 4 GB
READ_L2, READ_DRAM = 7.3, 3.0  # TB/s: 24 MB many times, 4 GB twice
# 132 SMs, each with 32 banks of 4 bytes a cycle (CUDA programming guide).
SHARED = 132 * 128 * 1980e6 / 1e12
# NVIDIA's data sheets.
FLOPS, DRAM_H100 = 67, 3.35  # float32, H100
IN_FLIGHT = READ_DRAM * DRAM / 1e3  # MB

MEASURED = "measured on an H100, as the glossary says"
SHEET = "NVIDIA's data sheets of both"
FACTS |= {
    f"{L1} ns - {SHARED:.0f} TB/s": f"{MEASURED}; the speed is computed",
    f"up to 228 KB in each SM - – - {SHARED:.0f} TB/s": "computed",
    f"50 MB; H200: 60 MB - {L2} ns - {READ_L2} TB/s": (
        f"{MEASURED}; the sizes are what the driver says"
    ),
    f"80 GB; H200: 141 GB - {DRAM} ns - {READ_DRAM} TB/s": (
        f"{MEASURED}; the sizes are those of the data sheets"
    ),
    "in 16 KB for L1, in 8 MB for L2 and in 4 GB for DRAM": "how",
    "24 MB again and again, and 4 GB twice": "how it was measured",
    "80 GB on an H100, 141 GB on an H200": SHEET,
    "50 MB on an H100 and 60 MB on an H200": "what the driver says",
    f"took {L1} ns on our H100": MEASURED,
    f"took {L2} ns on our H100": MEASURED,
    f"{L1} ns from L1, {L2} ns from L2 and {DRAM} ns from DRAM": MEASURED,
    "does nothing took 0.98 µs on an H100": (
        "tests/test_clock.py times an empty kernel"
    ),
    f"For {READ_DRAM} TB/s and {DRAM} ns that is {IN_FLIGHT:.1f} MB, or "
    f"{1000 * IN_FLIGHT / 132:.0f} KB for each SM": "computed from these",
    f"can do {FLOPS} TFLOP/s in float32 and move {DRAM_H100} TB/s": SHEET,
    "989 TFLOP/s in 16 bits": SHEET,
    f"{FLOPS} TFLOP/s in float32.": SHEET,
    "900 GB/s for each GPU by the data sheet": SHEET,
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
