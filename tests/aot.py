"""Compile kernels of a tutorial for a named GPU, on a machine without one.

    jobs = [Job("01-layer-norm", "_layer_norm_fwd", signature, constants,
                target="sm_90", num_warps=8)]
    ptx = build(jobs)[0].text

The work is done in a child process without TRITON_INTERPRET: with it,
triton.language itself is interpreted and cannot be compiled any more.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

# Triton 3.9 puts a barrier before a release by itself; 3.7 does not.
COMPILER_ADDS_BARRIER = [
    int(part) for part in version("triton").split(".")[:2]
] >= [3, 9]

TARGETS = {
    "sm_75": ("cuda", 75, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclasses.dataclass
class Job:
    tutorial: str
    kernel: str
    signature: dict  # name: "*fp16", "i32", "fp32"; ":16" = divisible by 16
    constants: dict  # constexpr name: value, "@name" for a function
    target: str = "sm_90"
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None  # most registers of a thread
    replace: tuple = ()  # pairs (old, new) that edit the source first


@dataclasses.dataclass
class Built:
    text: str  # PTX or AMD assembly
    registers: int  # per thread
    spills: int  # bytes stored by spilling, per thread
    shared: int  # bytes of shared memory

    def widths(self):
        """Counter of ("ld" or "st", bytes) of global accesses in PTX."""
        counts = Counter()
        pattern = r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b"
        for kind, lanes, bits in re.findall(pattern, self.text):
            counts[kind, int(lanes or 1) * int(bits) // 8] += 1
        return counts


def build(jobs):
    """A list of Built, one for each Job, all from one child process."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([dataclasses.asdict(job) for job in jobs]),
        capture_output=True,
        text=True,
        env=env,
    )
    if child.returncode:
        raise RuntimeError(child.stderr[-4000:])
    results = json.loads(child.stdout.splitlines()[-1])
    return [Built(**result) for result in results]


def _build(job, modules):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    key = job.tutorial, tuple(map(tuple, job.replace))
    if key not in modules:
        from tutorial import load

        modules[key] = load(job.tutorial, job.replace, interpret=False)
    kernel = getattr(modules[key], job.kernel)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in job.constants:
            signature[name] = "constexpr"
            continue
        kind, _, divisor = job.signature[name].partition(":")
        signature[name] = kind
        if divisor:
            attributes[i,] = [["tt.divisibility", int(divisor)]]
    constants = {
        name: _named(modules[key], value)
        for name, value in job.constants.items()
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    target = GPUTarget(*TARGETS[job.target])
    if job.maxnreg and target.backend == "cuda":
        options["maxnreg"] = job.maxnreg
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "vgpr_spill_count")
        )
    else:
        text = compiled.asm["ptx"]
        registers, spills = _ptxas(text, target.arch)
    return Built(text, registers, spills, compiled.metadata.shared)


def _named(module, value):
    """A constant; "@name" stands for a function of the tutorial."""
    if isinstance(value, str) and value.startswith("@"):
        return getattr(module, value[1:])
    return value


def _ptxas(ptx, arch):
    """Registers and spilled bytes, from the assembler that Triton uses."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(arch)
    real = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        report = subprocess.run(
            [tool.path, "-v", f"-arch={real}", path, "-o", os.devnull],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    spills = int(re.search(r"(\d+) bytes spill stores", report)[1])
    return registers, spills


def main():
    modules = {}
    jobs = [Job(**job) for job in json.load(sys.stdin)]
    built = [dataclasses.asdict(_build(job, modules)) for job in jobs]
    print(json.dumps(built))


if __name__ == "__main__":
    main()
