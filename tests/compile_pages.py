"""Compile what some tutorials launch, with the triton that is installed.

    python tests/compile_pages.py layer-norm/01-layer-norm ...

For each a line of JSON: whether everything compiles for sm_90 or the sentence
with which that ended, and the limits that its kernels no longer keep.
tests/triton_versions.py reads it.
"""

import json
import os
import sys

from compiled import declared, limits
from compiled.aot import Compilers


def calls(name):
    """What is compiled of a page: the widths that its panels show, its cases
    at their widest, and what else it launches."""
    page = declared.kernels(name)
    for N in page.N:
        yield page, limits.call(name, page, N, limits.DEFAULT), page.dtype
    for case in page.cases.values():
        for dtype, sizes in case.sizes.items():
            widest = max(sizes)
            yield (
                case,
                limits.call(
                    name, page, widest, limits.DEFAULT, dtype, case.run
                ),
                dtype,
            )
    if page.also:
        call = limits.call(
            name, page, page.N[0], limits.DEFAULT, run=page.also
        )
        yield None, call, page.dtype


def beyond(name, what, call, dtype, launched):
    """The limits that what a call launched does not keep."""
    page, N = declared.kernels(name), call.values["N"]
    for built in launched:
        if what is None or built.kernel not in page.kernels:
            continue
        kernel = page.kernels[built.kernel]
        if what is not page:
            kernel = limits.in_case(page, what, built.kernel)
        for each in limits.broken(kernel, built, N, dtype):
            yield f"{built.kernel}, N = {N}, {dtype}: {each}"


def compiled(name, compilers):
    """What came of a page: "passed" or a sentence, and limits not kept."""
    found = []
    for what, call, dtype in calls(name):
        try:
            launched = compilers.begin(call).result()
        except RuntimeError as error:
            return {"compiled": last_line(str(error)), "beyond": []}
        found += beyond(name, what, call, dtype, launched)
    return {"compiled": "passed", "beyond": sorted(set(found))}


def last_line(text):
    """What an error says in its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def main(names):
    # A page, and a process that compiles it, may print: their words go to
    # standard error.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with Compilers(workers=1) as compilers:
        for name in names:
            found = compiled(name, compilers)
            print(json.dumps([name, found]), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
