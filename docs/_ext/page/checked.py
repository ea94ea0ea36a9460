"""What a page was checked with: versions of triton, and GPUs.

It stands at the end of each tutorial and comes from three places: the
recordings, this build, and a file that ``make test-triton-versions`` writes.
That file has, for each version and page, the hash of the code that was
checked, the day, and what came of it. What was checked before the code of a
page changed says nothing of the page any more, and the page tells that.
"""

import json
import re
from contextlib import suppress
from importlib.metadata import version
from typing import NamedTuple

from sphinx.locale import _

import tutorial
import words_later as words
from measurements import gpus, recording

FILE = tutorial.ROOT / "docs" / "triton-versions.json"
PASSED = "passed"
# What is known of a page: "passed", or the sentence with which it broke, for
# a run of its script in the interpreter, and for compiling its kernels; and
# the limits of kernels that the compiler does not keep.
ENTRY = {
    "code": str,
    "date": str,
    "interpreter": str,
    "compiled": str,
    "beyond": list,
}


def read():
    """{version: {page: entry}}, the newest version last."""
    if not FILE.exists():
        return {}
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(found):
    """Write what was found: a line for each page."""
    lines = []
    for each in sorted(found, key=numbers):
        pages = [
            f"  {json.dumps(name)}: {json.dumps(found[each][name])}"
            for name in sorted(found[each])
        ]
        text = ",\n".join(pages)
        lines.append(f" {json.dumps(each)}: {{\n{text}\n }}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    FILE.write_text(text, encoding="utf-8")


def numbers(triton):
    """A version by which versions are sorted; "3.7.1+git" is as 3.7.1."""
    return [int(part) for part in re.findall(r"\d+", triton.partition("+")[0])]


def broke(entry):
    """Whether a page does not run or does not compile."""
    return {entry["interpreter"], entry["compiled"]} != {PASSED}


# On the page -----------------------------------------------------------------


class Row(NamedTuple):
    """A version of triton, and what was done with it."""

    triton: str
    said: str
    sentences: tuple = ()  # what the compiler or the interpreter said
    broke: bool = False


def rows(name, first):
    """What a page was checked with: by a GPU, by this build, and by others."""
    by_gpu = measured(name, first)
    for triton, where in by_gpu.items():
        said = _("compiled and measured on %(gpus)s") % {
            "gpus": words.said(words.listed(where, words.AND), _)
        }
        yield Row(triton, said)
    if not gpus.there():
        said = _("run in the interpreter and compiled for sm_90 by this build")
        yield Row(version("triton"), said)
    now = recording.code_of(name)
    for triton, pages in read().items():
        if name in pages:
            row = checked(triton, pages[name], now)
            # Of a version that ran on a GPU only what went wrong is new.
            if triton not in by_gpu or row.sentences:
                yield row


def measured(name, first):
    """{version of triton: the GPUs on which the page was measured with it,
    each with the last day}."""
    days = {}
    for gpu in recording.gpus(name, first):
        with suppress(recording.RecordingError):
            data = recording.load(gpu, name)
            for benchmark in data["benchmarks"].values():
                env = recording.environment_of(data, benchmark)
                its = days.setdefault(env["triton"], {})
                its[env["gpu"]] = max(env["date"], its.get(env["gpu"], ""))
    return {
        triton: [f"{gpu} ({day})" for gpu, day in its.items()]
        for triton, its in days.items()
    }


def checked(triton, entry, now):
    """What came of a check of a page, whose code has a hash now."""
    date = {"date": entry["date"]}
    if entry["code"] != now:
        said = _("an earlier version of this page was checked, %(date)s")
        return Row(triton, said % date)
    if broke(entry):
        said = _("this page breaks with it, %(date)s")
        results = (entry["interpreter"], entry["compiled"])
        sentences = tuple(each for each in results if each != PASSED)
        return Row(triton, said % date, sentences, broke=True)
    if entry["beyond"]:
        said = _(
            "run in the interpreter and compiled for sm_90, %(date)s, but not "
            "within the limits that our tests set"
        )
        return Row(triton, said % date, tuple(entry["beyond"]))
    said = _("run in the interpreter and compiled for sm_90, %(date)s")
    return Row(triton, said % date)


def at_the_end(app, pagename, templatename, context, doctree):
    """Put it at the end of a tutorial."""
    name = tutorial.of_page(pagename)
    if doctree is None or not name:
        return
    found = rows(name, app.config.measured_gpu)
    found = {"rows": sorted(found, key=lambda row: numbers(row.triton))}
    context["body"] += app.builder.templates.render("checked.html", found)


def setup(app):
    app.connect("html-page-context", at_the_end, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
