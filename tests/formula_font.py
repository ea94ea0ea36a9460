"""The letters that the site's formulas may have, in a font of its own.

Few readers have a font that can draw formulas. ``python
tests/formula_font.py`` cuts ``docs/_static/formulas.woff`` anew out of
``docs/_fonts/noto-sans-math.woff``: with what LaTeX's letters become, and the
signs that the built site has. test_formulas.py says when a sign is missing.
"""

import re
import unicodedata

from browser import built
from fontTools import subset
from fontTools.ttLib import TTFont

WHOLE = built.HERE / "docs/_fonts/noto-sans-math.woff"
CUT = built.HERE / "docs/_static/formulas.woff"
# What may come with the next formula.
EXPECTED = {
    *map(chr, range(0x20, 0x7F)),
    *"βγδεηθλμπρσφωϵΔΣ·×±−≈≠≤≥∑√∂∞→…⋅⊙ˆ⏞⏟",
}
ITALIC = [
    letter
    for letter in map(chr, (0x210E, *range(0x1D434, 0x1D7CC)))
    if unicodedata.name(letter, "").startswith(
        ("MATHEMATICAL ITALIC", "PLANCK")
    )
]


def of_site():
    """The letters of all formulas that the built site has."""
    found = set()
    for path in built.WHOLE.glob("*/**/*.html"):
        for math in re.findall(r"<math.*?</math>", path.read_text(), re.S):
            found.update(re.sub(r"<[^>]*>|\s", "", math))
    return found


def shown(letters):
    """With the form that a browser gives to a variable of one letter."""
    plain = {unicodedata.normalize("NFKC", each) for each in letters}
    return {*letters} - {"\u2061"} | {
        each for each in ITALIC if unicodedata.normalize("NFKC", each) in plain
    }


def has():
    """The letters of a font, as pairs: of the cut one, and of the whole."""
    fonts = (TTFont(path).getBestCmap() for path in (CUT, WHOLE))
    return [{*map(chr, each)} for each in fonts]


def main():
    font = TTFont(WHOLE, recalcTimestamp=False)
    subsetter = subset.Subsetter(subset.Options(layout_features=["*"]))
    subsetter.populate(text="".join(sorted(shown(EXPECTED | of_site()))))
    subsetter.subset(font)
    font.save(CUT)
    print(f"{CUT}: {CUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
