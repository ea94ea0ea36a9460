"""What is kept of the kernels of a page: what its X-ray panels are made of.

The English build compiles and writes ``docs/tutorials/xray``: a file for each
page, and beside it the codes of its kernels, to be downloaded. Each language
makes its panels of that.
"""

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import tutorial
from compiled import declared, limits, occupancy, sheets

FOLDER = tutorial.MADE / "xray"


def file_of(name):
    return FOLDER / f"{tutorial.file_name(name)}.json"


def calls(name):
    """What is compiled for the panels of a page."""
    page = declared.kernels(name)
    for target, N in limits.shown(page):
        first = page.N[0] == N
        yield limits.call(
            *(name, page, N, target),
            sass=first and target == limits.DEFAULT,  # it takes long
            last=True,
            then=sheets.full if first else sheets.brief,
        )
    yield limits.call(
        *(name, page, page.N[0], limits.SMALLEST),
        last=True,
        then=sheets.brief,
    )


def write(name, found):
    """Write what came of these calls: pairs of a call and its sheets."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    page, kept = declared.kernels(name), []
    for call, launched in found:
        wanted = limits.kernels_for(call.target, page)
        for kernel in wanted ^ launched.keys():
            declares = "declares" if kernel in wanted else "lacks"
            launches = "launches" if kernel in launched else "does not launch"
            raise LookupError(
                f"{declared.place(name)}: KERNELS {declares} {kernel}, which "
                f"{call.run} {launches} (N = {call.values['N']}, "
                f"{call.target})"
            )
        for sheet in launched.values():
            for key, text in sheet.codes.items():
                start = f"{tutorial.file_name(name)}.{sheet.kernel}"
                sheet.codes[key] = f"{start}.{sheet.target}.{key}"
                (FOLDER / sheet.codes[key]).write_text(text, encoding="utf-8")
            kept.append([call.values["N"], asdict(sheet)])
    draft = file_of(name).with_suffix(".draft")
    data = {"made_from": made_from(name), "sheets": kept}
    draft.write_text(json.dumps(data), encoding="utf-8")
    os.replace(draft, file_of(name))  # whole or not at all


def read(name):
    """What was written: {(kernel, target, N): Sheet}."""
    kept = json.loads(file_of(name).read_text(encoding="utf-8"))
    return {
        (sheet["kernel"], sheet["target"], N): sheets.Sheet(**sheet)
        for N, sheet in kept["sheets"]
    }


def compiled_for(name):
    """{target: whether all kernels of a page compile for it}, and a program
    of each has the shared memory that it asks for."""
    page, found = declared.kernels(name), {}
    for (_kernel, target, N), sheet in read(name).items():
        if page.N[0] == N:
            limit = occupancy.LIMITS[target]
            fits = sheet.shared <= limit.shared - limit.reserved
            found[target] = found.get(target, True) and fits
    targets = limits.SMALLEST, *limits.SHOWN
    return {target: found.get(target, False) for target in targets}


def fresh(name):
    """Whether what is kept is whole, and of the page as it is."""
    try:
        kept = json.loads(file_of(name).read_text(encoding="utf-8"))
        files = [f for _, s in kept["sheets"] for f in s["codes"].values()]
        whole = all((FOLDER / file).exists() for file in files)
        return whole and kept["made_from"] == made_from(name)
    except (OSError, ValueError):
        return False


def made_from(name):
    """A hash of everything that the panels of a page depend on."""
    made_by = sorted(Path(__file__).parent.glob("*.py"))
    declares = declared.kernels(name).kernels.values()
    named = {name} | {kernel.page for kernel in declares if kernel.page}
    said = map(declared.file_of, sorted(named))
    files = tutorial.script_of(name), *said, *made_by
    found = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    found.update(f"{version('triton')} {version('torch')}".encode())
    return found.hexdigest()
