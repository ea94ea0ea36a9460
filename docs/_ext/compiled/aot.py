"""Compile kernels of a tutorial for a named GPU, on a machine without one.

They are compiled as the tutorial's own wrapper would launch them there:

    call = Call("sums/01-double", run, {"M": 8, "N": 16}, target="sm_90")
    with Compilers() as compilers:
        for built in compilers.launches([call])[0]:
            print(built.kernel, built.registers)
"""

import dataclasses
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace

from compiled import declared, machine_code, occupancy, sass
from tutorial import load

TRITON = ".".join(version("triton").split(".")[:2])
# Triton 3.9 puts a barrier before a release by itself; 3.7 does not.
COMPILER_ADDS_BARRIER = [int(part) for part in TRITON.split(".")] >= [3, 9]

TARGETS = {
    "sm_75": ("cuda", 75, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
}

# What a wrapper may ask about its GPU: name, multiprocessors, capability.
DEVICES = {
    "sm_75": ("NVIDIA T4", 40, (7, 5)),
    "sm_80": ("NVIDIA A100", 108, (8, 0)),
    "sm_90": ("NVIDIA H200", 132, (9, 0)),
    "sm_100": ("NVIDIA B200", 148, (10, 0)),
    "gfx90a": ("AMD MI250X", 110, (9, 0)),
    "gfx942": ("AMD MI300X", 304, (9, 4)),
}


@dataclasses.dataclass
class Call:
    """A call of a function that calls a tutorial's wrappers.

    It is a function of the page's file in tests/pages, and gets the module
    with the tutorial's definitions first. Tensors are on the meta device:
    they have shapes and no numbers. Each launch compiles what would be
    launched on the GPU of the target.
    """

    tutorial: str
    run: Callable | str  # kept by its name, for another process
    values: dict  # its other arguments; a dtype is its name
    target: str = "sm_90"
    replace: tuple = ()  # pairs (old, new) that edit the source first
    source: str | None = None  # another text of the tutorial
    sass: bool = False  # disassemble as well, where that is possible
    last: bool = False  # of each kernel, only its last launch
    then: Callable | None = None  # what to make of each Built, over there

    def __post_init__(self):
        if callable(self.run):
            self.run = self.run.__name__


@dataclasses.dataclass
class Built:
    kernel: str
    target: str
    compiler: str  # and its version
    registers: int  # per thread
    spills: int  # bytes of memory that a thread's spilled registers take
    shared: int  # bytes of shared memory
    num_warps: int
    num_stages: int
    tutorial: str
    asm: dict  # "ttir", "ttgir", then "ptx" and perhaps "sass", or "amdgcn"
    grid: tuple = ()  # programs, if it was launched
    columns: int | None = None  # what it was given as N

    @property
    def script(self):
        """The file of the kernel, as generated code names it."""
        return self.tutorial.rpartition("/")[2] + ".py"

    @property
    def text(self):
        """PTX or AMD assembly."""
        return self.asm.get("ptx") or self.asm["amdgcn"]

    def widths(self):
        """Counter of ("ld" or "st", bytes) of global accesses."""
        names = {"load": "ld", "store": "st"}
        return Counter(
            (names[mark.kind], mark.bytes)
            for mark in machine_code.marks(self.text)
            if mark.kind in names
        )


class Compilers(ProcessPoolExecutor):
    """Processes that compile, one for each core, until they are shut down.

    TRITON_INTERPRET is not set in them: with it, triton.language itself is
    interpreted and cannot be compiled any more.
    """

    def __init__(self, workers=None):
        workers = workers or len(os.sched_getaffinity(0))
        spawn = multiprocessing.get_context("spawn")
        super().__init__(workers, spawn, initializer=_start)

    def launches(self, calls):
        """For each Call the list of Built of what it launches, in order."""
        return list(self.map(_launched, calls))


# In such a process -----------------------------------------------------------


def _start():
    assert "triton" not in sys.modules
    os.environ.pop("TRITON_INTERPRET", None)
    gc.set_threshold(50_000)  # 700 costs a twentieth of the time
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    """Also when it is killed: the others of the pool would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


@cache
def _module(name, replace, source, target):
    """A tutorial; it may ask about its GPU, the target, while it is loaded."""
    return load(name, replace, False, source)


def _launched(call):
    try:
        return _compiled(call)
    except Exception:
        said = traceback.format_exc()[-4000:]
        raise RuntimeError(f"{call.tutorial}: {said}") from None


def _compiled(call):
    """Run the code; every launch compiles instead."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    _, multiprocessors, capability = DEVICES[call.target]
    target = GPUTarget(*TARGETS[call.target])
    # The device that the wrapper sees, and the driver that Triton asks.
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2  # a torch of CUDA cannot count AMD's
    torch.cuda.Stream = lambda *args: None
    torch.cuda.get_device_capability = lambda *args: capability
    limits = occupancy.LIMITS[call.target]
    torch.cuda.get_device_properties = lambda *args: SimpleNamespace(
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=limits.shared - limits.reserved,
    )
    torch.version.hip = "6.0" if target.backend == "hip" else None
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )
    )
    launched = []

    def launch(kernel, grid):
        def later(*args, **options):
            launched.append((kernel, grid, args, options))

        return later

    KernelInterface.__getitem__ = launch
    replace = tuple(map(tuple, call.replace))
    module = _module(call.tutorial, replace, call.source, call.target)
    module.DEVICE = torch.device("meta")
    values = {
        name: getattr(torch, value) if name == "dtype" else value
        for name, value in call.values.items()
    }
    if call.run.isidentifier():
        getattr(declared.loaded(call.tutorial), call.run)(module, **values)
    else:
        exec(call.run, module.__dict__ | values)
    if call.last:
        launched = {kernel: (kernel, *more) for kernel, *more in launched}
        launched = launched.values()
    builds, cubins = [], []
    for kernel, grid, args, options in launched:
        compiled = kernel.warmup(*args, grid=grid, **options)
        built = _measured(compiled, kernel, call, grid)
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        built.columns = given.get("N")
        builds.append(built)
        cubins.append(compiled.asm.get("cubin"))
    if call.sass and all(cubins):
        _disassemble(builds, cubins)
    return [call.then(b) for b in builds] if call.then else builds


def _disassemble(builds, cubins):
    """Add SASS to builds for one target."""
    from triton import knobs

    arch = re.search(r"^\.target (\w+)", builds[0].text, re.MULTILINE)[1]
    found = sass.disassembled(cubins, arch, knobs.nvidia.nvdisasm.path)
    for built, text in zip(builds, found, strict=True):
        built.asm["sass"] = text


def _measured(compiled, kernel, call, grid):
    kept = ("ttir", "ttgir", "ptx", "amdgcn")
    asm = {
        name: anywhere(compiled.asm[name], call.tutorial)
        for name in kept
        if name in compiled.asm
    }
    compiler, target = f"triton {version('triton')}", compiled.metadata.target
    if "amdgcn" in asm:
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        registers, spills = _resources(compiled.asm["cubin"])
        compiler += f", ptxas {_ptxas(target)}"
    stages = re.search(r"tt\.num_stages = (\d+)", asm["ttir"])
    data = compiled.metadata
    return Built(
        kernel=kernel.__name__,
        target=call.target,
        registers=registers,
        spills=spills,
        shared=data.shared,
        num_warps=data.num_warps,
        # tl.range may have its own; other loops have that of the launch.
        num_stages=int(stages[1]) if stages else data.num_stages,
        tutorial=call.tutorial,
        compiler=compiler,
        asm=asm,
        grid=grid if isinstance(grid, tuple) else (),
    )


def anywhere(code, tutorial):
    """Without debug data, and without the folder of any machine.

    What Triton kept may have been compiled elsewhere, even in this checkout:
    before it was moved, on a GPU, where a tutorial runs as it stands, or for
    another page, whose kernel has the same text in the same lines.
    """
    code = re.split(r"^\s*\.section\s+\.debug", code, flags=re.MULTILINE)[0]
    code = re.sub(
        r'"/(?:[^"\n]*/)?(triton/language|tutorials)\b', r'"\1', code
    )
    folder, _, stem = f"tutorials/{tutorial}".rpartition("/")
    page = r'"tutorials[\w/-]*?(/|" ")[\w-]+\.py"'
    code = re.sub(page, rf'"{folder}\g<1>{stem}.py"', code)
    return re.sub(r"\b\d\d-[\w-]+(?=\.py:\d)", stem, code)  # in a comment


@cache
def _ptxas(target):
    """The version of what Triton takes for a GPU; not one for all."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(target.arch).version


def _resources(cubin):
    """Registers, and bytes of memory for spilled ones, of a thread."""
    from triton import knobs

    report = _tool(cubin, knobs.nvidia.cuobjdump.path, "-res-usage")
    return tuple(
        int(re.search(rf"\b{name}:(\d+)", report)[1])
        for name in ("REG", "STACK")
    )


def _tool(cubin, *command):
    """What a tool that comes with Triton says about a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [*command, file.name], check=True, capture_output=True, text=True
        ).stdout
