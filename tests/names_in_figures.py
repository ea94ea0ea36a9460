"""The English words that readers of a translation meet in measured figures.

Axis titles and the names of lines stay as the script has them. So the text
of a page has each of them in both forms: the name with its meaning in a
full-width bracket behind it, or the meaning with the name in the bracket.
"""

import functools
import re

import checks_of_translations as checks

import tutorial
from measurements import recording, replay
from translation import catalogs

CJK = checks.CJK
# Names that are words: of libraries, of functions, of what is computed.
NAMES = {
    *("triton", "liger", "apex", "quack", "fla", "flash-attn", "llama"),
    *("gradcheck", "reduce-overhead", "erf", "tanh"),
    *("dq", "dk", "dv", "ds", "dx", "dw", "db", "µs", "and"),
}
PHRASES = re.compile("Cut Cross-Entropy")
# Around a name in a sentence.
MARKS = re.compile(r"[`*“”「」\"]")

# Not the end of a longer name: "Split columns" is not "columns".
NAME = r"(?<![A-Za-z-])(?<![A-Za-z] )NAME\)?"
WAYS = (
    rf"{NAME}\s?（[^（）]*{CJK}",  # Copy（复制）
    rf"{CJK}\s?（(?:[^（）]*[、，；]\s?)?{NAME}[）、，；]",  # 复制（Copy）
    rf"（{NAME}[、，：][^（）]*{CJK}",  # N（columns，列数）
    rf"（[^（）]*{CJK}[^（）]*[、，：]\s?{NAME}）",  # N（列数，columns）
)


@functools.cache
def benchmarks(name):
    """The benchmarks of a page as they are drawn, by their names."""
    import triton.testing

    def marks(value):
        if isinstance(value, triton.testing.Mark):
            its = value.benchmarks
            yield from its if isinstance(its, list) else [its]
        elif isinstance(value, dict):
            for each in value.values():
                yield from marks(each)
        elif isinstance(value, list | tuple):
            for each in value:
                yield from marks(each)

    found = {}
    rows = recorded(name)
    for value in list(vars(tutorial.load(name)).values()):
        for bench in marks(value):
            plot = bench.plot_name
            found[plot] = (
                replay.with_recorded_peers(bench, rows[plot])
                if plot in rows
                else bench
            )
    return found


def recorded(name):
    """{plot: rows} of what was recorded for a page, on all GPUs."""
    found = {}
    for gpu in recording.gpus(name):
        for plot, its in recording.read(gpu, name)["benchmarks"].items():
            found.setdefault(plot, []).extend(its.get("rows", ()))
    return found


def shown(name):
    """{name: where it stands} of the axes and legends of a page."""
    found = {}

    def note(text, kind, plot):
        found.setdefault(text, {}).setdefault(kind, []).append(plot)

    for plot, bench in benchmarks(name).items():
        x = bench.xlabel or bench.x_names[0]
        note("N (columns)" if x == "N" else x, "x axis", plot)
        note(bench.ylabel, "y axis", plot)
        for line in bench.line_names:
            note(line, "legend", plot)
    return found


def parts(name):
    """What a name is put together of: "cuDNN", "by PyTorch"."""
    if inside := re.search(r" \((\w[^()]*)\)$", name):  # of N (columns)
        return [inside[1]]
    return re.split(r"[,:] ", name)


def has_words(part, code):
    """Whether there is something to translate: a word that is no name, no
    unit and no symbol, and that the language has otherwise."""
    for word in PHRASES.sub("", part).split():
        bare = word.strip("()").removesuffix("'s")
        if (
            len(bare) > 1
            and re.fullmatch(r"[A-Za-z]?[a-z-]+", bare)
            and bare.lower() not in NAMES
            and not stays(bare.lower(), code)
        ):
            return True
    return False


def stays(word, code):
    """Whether a language has the English word for a term."""
    return any(
        re.fullmatch(term, word) and {w.lower() for w in said} == {word_of}
        for term, said, word_of in terms(code)
    )


@functools.cache
def terms(code):
    return [
        (term, said, checks.term_of(term))
        for term, said in checks.glossary(code)
    ]


def is_named(part, text):
    """Whether a text has a name in both forms."""
    return any(
        re.search(way.replace("NAME", each), text, re.IGNORECASE)
        for each in forms(part)
        for way in WAYS
    )


def forms(part):
    """A name, and what says as much: in the singular, without its number."""
    part = MARKS.sub("", part)
    yield re.escape(part)
    if re.fullmatch(r"\w+s", part):
        yield re.escape(part) + "?"
    if bare := re.sub(r"^\d+ | \d+$", "", part):
        yield re.escape(bare)


def unnamed(name, code):
    """{name: (its parts that no text has in both forms, where it stands)}."""
    text = "\n".join(
        MARKS.sub("", catalogs.done(message))
        for message in catalogs.read(code, tutorial.page_of(name))
        if message.id and catalogs.done(message)
    )
    found = {}
    for each, where in shown(name).items():
        its = [part for part in parts(each) if has_words(part, code)]
        lacking = [part for part in its if not is_named(part, text)]
        if lacking and not is_named(each, text):
            found[each] = lacking, where
    return found
