"""Compile kernels of a tutorial for a named GPU, on a machine without one.

Either as the tutorial's own wrapper would launch them on that GPU:

    call = Call("01-layer-norm", "forward(*args)", {...}, target="sm_90")
    for built in launches([call])[0]:
        print(built.kernel, built.registers)

or with a signature and options of one's own:

    jobs = [Job("01-layer-norm", "_layer_norm_fwd", signature, constants,
                target="sm_90", num_warps=8)]
    ptx = build(jobs)[0].text

The work is done in a child process without TRITON_INTERPRET: with it,
triton.language itself is interpreted and cannot be compiled any more.
"""

import dataclasses
import gc
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from compiled import machine_code, occupancy, sass

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
    """Code that calls a tutorial's wrappers, run among its definitions.

    Tensors are on the meta device: they have shapes and no numbers. Each
    launch compiles what would be launched on the GPU of the target.
    """

    tutorial: str
    code: str
    values: dict  # names that the code uses; a dtype is its name
    target: str = "sm_90"
    replace: tuple = ()  # pairs (old, new) that edit the source first
    source: str | None = None  # another text of the tutorial
    sass: bool = False  # disassemble as well, where that is possible
    last: bool = False  # of each kernel, only its last launch
    then: Callable | None = None  # what to make of each Built, over there


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
    kernel: str
    target: str
    registers: int  # per thread
    spills: int  # bytes of memory that a thread's spilled registers take
    shared: int  # bytes of shared memory
    num_warps: int
    num_stages: int
    script: str  # the file of the kernel
    asm: dict  # "ttir", "ttgir", then "ptx" and perhaps "sass", or "amdgcn"
    grid: tuple = ()  # programs, if it was launched
    columns: int | None = None  # what it was given as N

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


def build(jobs):
    """A list of Built, one for each Job."""
    return _in_children(jobs)


def launches(calls, workers=None):
    """For each Call the list of Built of what it launches, in order."""
    return _in_children(calls, workers)


def _in_children(tasks, workers=None):
    """The results for all tasks, from a child process for each core."""
    workers = workers or len(os.sched_getaffinity(0))
    workers = max(1, min(workers, len(tasks) // 4))
    results = [None] * len(tasks)
    shares = [range(i, len(tasks), workers) for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(lambda s: _child([tasks[i] for i in s]), shares)
        for share, part in zip(shares, done, strict=True):
            for i, result in zip(share, part, strict=True):
                results[i] = result
    return results


def _child(tasks):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # In front of a version of triton that may stand there.
    paths = str(Path(__file__).parents[1]), env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks"
        path.write_bytes(pickle.dumps(tasks))
        done = subprocess.run(
            [sys.executable, "-m", "compiled.aot", path],
            capture_output=True,
            text=True,
            env=env,
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-4000:])
        return pickle.loads(path.read_bytes())


# In the child ----------------------------------------------------------------


def _work():
    path, modules = Path(sys.argv[1]), {}
    gc.set_threshold(50_000)  # 700 costs a twentieth of the time
    results = [
        (_launched if isinstance(task, Call) else _built)(task, modules)
        for task in pickle.loads(path.read_bytes())
    ]
    path.write_bytes(pickle.dumps(results))


def _module(task, modules):
    from tutorial import load

    source = getattr(task, "source", None)
    key = task.tutorial, tuple(map(tuple, task.replace)), source
    # A tutorial may ask about its GPU while it is loaded.
    key += (task.target,) if isinstance(task, Call) else ()
    if key not in modules:
        modules[key] = load(task.tutorial, task.replace, False, source)
    return modules[key]


def _launched(call, modules):
    """Run the code; every launch compiles instead."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    _, multiprocessors, capability = DEVICES[call.target]
    target = GPUTarget(*TARGETS[call.target])
    # The device that the wrapper sees, and the driver that Triton asks.
    torch.cuda.is_available = lambda: True
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
    module = _module(call, modules)
    module.DEVICE = torch.device("meta")
    values = {
        name: getattr(torch, value) if name == "dtype" else value
        for name, value in call.values.items()
    }
    exec(call.code, module.__dict__ | values)
    if call.last:
        launched = {kernel: (kernel, *more) for kernel, *more in launched}
        launched = launched.values()
    builds, cubins = [], []
    for kernel, grid, args, options in launched:
        compiled = kernel.warmup(*args, grid=grid, **options)
        built = _measured(compiled, kernel, call.target, grid)
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


def _built(job, modules):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(_module(job, modules), job.kernel)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in job.constants:
            signature[name] = "constexpr"
            continue
        kind, _, divisor = job.signature[name].partition(":")
        signature[name] = kind
        if divisor:
            attributes[i,] = [["tt.divisibility", int(divisor)]]
    module = _module(job, modules)
    constants = {
        name: _named(module, value) for name, value in job.constants.items()
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    target = GPUTarget(*TARGETS[job.target])
    if job.maxnreg and target.backend == "cuda":
        options["maxnreg"] = job.maxnreg
    compiled = triton.compile(source, target=target, options=options)
    return _measured(compiled, kernel, job.target)


def _named(module, value):
    """A constant; "@name" stands for a function of the tutorial."""
    if isinstance(value, str) and value.startswith("@"):
        return getattr(module, value[1:])
    return value


def _measured(compiled, kernel, target, grid=()):
    kept = ("ttir", "ttgir", "ptx", "amdgcn")
    asm = {
        name: anywhere(compiled.asm[name])
        for name in kept
        if name in compiled.asm
    }
    if "amdgcn" in asm:
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        registers, spills = _resources(compiled.asm["cubin"])
    stages = re.search(r"tt\.num_stages = (\d+)", asm["ttir"])
    data = compiled.metadata
    return Built(
        kernel=kernel.__name__,
        target=target,
        registers=registers,
        spills=spills,
        shared=data.shared,
        num_warps=data.num_warps,
        # tl.range may have its own; other loops have that of the launch.
        num_stages=int(stages[1]) if stages else data.num_stages,
        script=Path(kernel.fn.__code__.co_filename).name,
        asm=asm,
        grid=grid if isinstance(grid, tuple) else (),
    )


def anywhere(code):
    """Without debug data, and without the folder of any machine.

    What Triton kept may have been compiled elsewhere, even in this checkout:
    before it was moved, or on a GPU, where a tutorial runs as it stands.
    """
    code = re.split(r"^\s*\.section\s+\.debug", code, flags=re.MULTILINE)[0]
    return re.sub(
        r'"/(?:[^"\n]*/)?(triton/language|tutorials)\b', r'"\1', code
    )


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


if __name__ == "__main__":
    from compiled import aot  # as the tasks know it

    aot._work()
