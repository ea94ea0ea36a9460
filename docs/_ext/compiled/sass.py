"""SASS of compiled kernels, with the lines of PTX that it comes from.

nvdisasm needs most of its time to start, so it reads many kernels at once.
It does so only from bare instructions: which lines they come from is then
read here, from a table of the format that DWARF 2 describes.
"""

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right


def disassembled(cubins, arch, nvdisasm):
    """The SASS of each cubin; arch is for example ``sm_90a``.

    Instructions have their places among those of all cubins.
    """
    parts = [sections(cubin) for cubin in cubins]
    codes = [
        next(code for name, code in part.items() if name.startswith(".text."))
        for part in parts
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
    for part, code in zip(parts, codes, strict=True):
        table = part.get(".nv_debug_line_sass", b"")
        lines |= {start + at: line for at, line in rows(table)}
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


def sections(elf):
    """The sections of a 64-bit ELF file, by name."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    heads = [
        struct.unpack_from("<II4Q", elf, table + i * size)
        for i in range(count)
    ]
    names = heads[names][4]
    found = {}
    for name, _, _, _, start, length in heads:
        end = elf.index(b"\0", names + name)
        found[elf[names + name : end].decode()] = elf[start : start + length]
    return found


def rows(table):
    """Pairs of address and line from one line table of DWARF 2."""
    if not table:
        return
    length, _, header = struct.unpack_from("<IHI", table)
    step, _, base, width, first = struct.unpack_from("<BBbBB", table, 10)
    counts = table[15 : 14 + first]  # of the operands of standard codes
    at, address, line = 10 + header, 0, 1

    def number(signed=False):
        nonlocal at
        value = bits = 0
        while True:
            byte = table[at]
            at += 1
            value |= (byte & 127) << bits
            bits += 7
            if byte < 128:
                return value - (1 << bits) * (signed and byte >> 6)

    while at < length + 4:
        code = table[at]
        at += 1
        if code >= first:
            address += step * ((code - first) // width)
            line += base + (code - first) % width
            yield address, line
        elif code == 0:  # an extended code
            size = number()
            if table[at] == 2:
                (address,) = struct.unpack_from("<Q", table, at + 1)
            elif table[at] == 1:
                address, line = 0, 1
            at += size
        elif code == 1:
            yield address, line
        elif code == 2:
            address += step * number()
        elif code == 3:
            line += number(signed=True)
        elif code == 8:
            address += step * ((255 - first) // width)
        elif code == 9:
            address += struct.unpack_from("<H", table, at)[0]
            at += 2
        else:
            for _ in range(counts[code - 1]):
                number()
