"""Compile kernels of a tutorial for a named GPU, on a machine without one.

They are compiled as the tutorial's own wrapper would launch them there:

    call = Call("sums/01-double", run, {"M": 8, "N": 16}, target="sm_90")
    with Compilers() as compilers:
        for built in compilers.launches([call])[0]:
            print(built.kernel, built.registers)

All that this needs of the insides of triton and torch stands here.
"""

import dataclasses
import gc
import multiprocessing
import multiprocessing.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace

import tutorial
from compiled import declared, occupancy

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


class Compilers(ProcessPoolExecutor):
    """Processes that compile, one for each core, until they are shut down.

    TRITON_INTERPRET is not set in them: with it, triton.language itself is
    interpreted and cannot be compiled any more.
    """

    def __init__(self, workers=None):
        workers = workers or len(os.sched_getaffinity(0))
        spawn = multiprocessing.get_context("spawn")
        super().__init__(workers, spawn, initializer=_start)
        # In a process of multiprocessing, which closes the queue at its end
        # and then waits for those who read it.
        multiprocessing.util.Finalize(None, self.end, exitpriority=100)

    def end(self):
        """Leave what has not begun; wait for what has."""
        self.shutdown(cancel_futures=True)

    def begin(self, call):
        """The future list of Built of what a Call launches, in order."""
        return self.submit(_launched, call)

    def launches(self, calls):
        """For each Call that list, when all are compiled."""
        return [future.result() for future in [*map(self.begin, calls)]]


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
def _module(name, replace, target):
    """A tutorial; it may ask about its GPU, the target, while it is loaded."""
    return tutorial.load(name, replace, interpret=False)


def _launched(call):
    try:
        return _compiled(call)
    except Exception:
        said = traceback.format_exc()[-4000:]
        raise RuntimeError(f"{call.tutorial}: {said}") from None


def _compiled(call):
    """Call the function; every launch compiles instead."""
    import torch

    launched = _stand_in(call.target)
    # Of this page alone: Triton knows a kernel by its text and its line, and
    # the name of a file stands in what it made.
    kept = tutorial.KERNELS / tutorial.file_name(call.tutorial)
    os.environ["TRITON_CACHE_DIR"] = str(kept)
    replace = tuple(map(tuple, call.replace))
    module = _module(call.tutorial, replace, call.target)
    module.DEVICE = torch.device("meta")
    values = {
        name: getattr(torch, value) if name == "dtype" else value
        for name, value in call.values.items()
    }
    getattr(declared.loaded(call.tutorial), call.run)(module, **values)
    if call.last:
        launched = {kernel: (kernel, *more) for kernel, *more in launched}
        launched = launched.values()
    builds = [_built(call, *launch) for launch in launched]
    return [call.then(b) for b in builds] if call.then else builds


def _stand_in(name):
    """Let torch and triton believe that there is this GPU; the list of all
    launches to come."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    _, multiprocessors, capability = DEVICES[name]
    target, limits = GPUTarget(*TARGETS[name]), occupancy.LIMITS[name]
    properties = SimpleNamespace(
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=limits.shared - limits.reserved,
    )
    _replace(torch.cuda, "is_available", lambda: True)
    # A torch of CUDA cannot count the GPUs of AMD.
    _replace(torch.cuda, "device_count", lambda: 2)
    _replace(torch.cuda, "Stream", lambda *args: None)
    _replace(torch.cuda, "get_device_capability", lambda *args: capability)
    _replace(torch.cuda, "get_device_properties", lambda *args: properties)
    _replace(torch.version, "hip", "6.0" if target.backend == "hip" else None)
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

    _replace(KernelInterface, "__getitem__", launch)
    return launched


def _replace(owner, name, value):
    """Like setattr, of what is there: another version may have it no more."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"{owner.__name__} has no {name}: docs/_ext/compiled/aot.py knows "
            f"torch and triton as of triton 3.7, not {version('triton')}"
        )
    setattr(owner, name, value)


def _built(call, kernel, grid, args, options):
    """What a launch is compiled to."""
    compiled = kernel.warmup(*args, grid=grid, **options)
    data, asm = compiled.metadata, compiled.asm
    compiler = f"triton {version('triton')}"
    if "amdgcn" in asm:
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        registers, spills = _resources(asm["cubin"])
        compiler += f", ptxas {_ptxas(data.target)}"
    texts = {
        name: anywhere(asm[name])
        for name in ("ttir", "ttgir", "ptx", "amdgcn")
        if name in asm
    }
    if call.sass and "cubin" in asm:
        texts["sass"] = _sass(asm["cubin"])
    # Gluon begins with ttgir.
    stages = re.search(r"tt\.num_stages = (\d+)", texts.get("ttir", ""))
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    return Built(
        kernel=kernel.__name__,
        target=call.target,
        compiler=compiler,
        registers=registers,
        spills=spills,
        shared=data.shared,
        num_warps=data.num_warps,
        # tl.range may have its own; other loops have that of the launch.
        num_stages=int(stages[1]) if stages else data.num_stages,
        tutorial=call.tutorial,
        asm=texts,
        grid=grid if isinstance(grid, tuple) else (),
        columns=given.get("N"),
    )


def anywhere(code):
    """Without debug data, and without the folder of this machine's triton."""
    code = re.split(r"^\s*\.section\s+\.debug", code, flags=re.MULTILINE)[0]
    return re.sub(r'"/(?:[^"\n]*/)?(triton/language)\b', r'"\1', code)


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


def _sass(cubin):
    """Its instructions, behind comments with the lines of PTX that they come
    from."""
    from triton import knobs

    report = _tool(cubin, knobs.nvidia.nvdisasm.path, "-gp", "-c", "-ndf")
    lines = []
    for line in report.splitlines():
        if place := re.search(r'ptx_txt", line (\d+)', line):
            lines.append(f"\t// PTX line {place[1]}")
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _tool(cubin, *command):
    """What a tool that comes with Triton says about a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [*command, file.name], check=True, capture_output=True, text=True
        ).stdout
