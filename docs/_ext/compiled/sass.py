"""SASS of compiled kernels, with the lines of PTX that it comes from.

nvdisasm needs most of its time to start, so it reads many kernels at once.
It does so only from bare instructions: which lines they come from is then
read here, from a table in a section of NVIDIA's own.
"""

import re
import subprocess
import tempfile
from bisect import bisect_right
from io import BytesIO

from elftools.dwarf.dwarfinfo import DebugSectionDescriptor
from elftools.elf.elffile import ELFFile


def disassembled(cubins, arch, nvdisasm):
    """The SASS of each cubin; arch is for example ``sm_90a``.

    Instructions have their places among those of all cubins.
    """
    elves = [ELFFile(BytesIO(cubin)) for cubin in cubins]
    codes = [
        next(
            s.data()
            for s in elf.iter_sections()
            if s.name.startswith(".text.")
        )
        for elf in elves
    ]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        text = subprocess.run(
            [nvdisasm, "-b", arch.replace("sm_", "SM"), file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    lines, starts, start = {}, [], 0
    for elf, code in zip(elves, codes, strict=True):
        lines |= {start + at: line for at, line in lines_of(elf)}
        starts.append(start)
        start += len(code)
    results = [[] for _ in cubins]
    for instruction in text.splitlines():
        place = re.match(r"\s*/\*([0-9a-f]{4,})\*/", instruction)
        if not place:
            continue
        at = int(place[1], 16)
        found = results[bisect_right(starts, at) - 1]
        if at in lines:
            found.append(f"\t// PTX line {lines[at]}")
        found.append(instruction)
    return ["\n".join(found) + "\n" for found in results]


def lines_of(elf):
    """Pairs of address and line of PTX, from one line table of DWARF."""
    section = elf.get_section_by_name(".nv_debug_line_sass")
    if section is None:
        return []
    # ptxas writes it beside .debug_line, without the units that would name it.
    data = section.data()
    dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False)
    dwarf.debug_line_sec = DebugSectionDescriptor(
        BytesIO(data), section.name, 0, len(data), 0
    )
    program = dwarf._parse_line_program_at_offset(0, dwarf.structs)
    states = (entry.state for entry in program.get_entries())
    return [(s.address, s.line) for s in states if s and not s.end_sequence]
