"""As if this machine had GPUs, in every process that finds this file first.

Only what is asked about a GPU is made up, and a clock that counts on the CPU.
Kernels run in Triton's interpreter. STAND_IN_GPUS says how many there are,
and CUDA_VISIBLE_DEVICES works as it does with a driver.

STAND_IN_NODES makes up device files that no driver stands behind. For the
stand-in for ncu, launch() says which kernels were launched in which ranges.

Nothing is imported for it: many processes need neither torch nor triton, and
those that do are given the changed ones.
"""

import functools
import importlib.util
import json
import os
import pathlib
import sys
import threading
import time


def visible():
    there = [str(i) for i in range(int(os.environ.get("STAND_IN_GPUS", 0)))]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return there
    return [g for g in given.split(",") if g in there]


def do_bench(fn, warmup=25, rep=100, quantiles=None, **_):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        fn()
        times.append(1000 * (time.perf_counter() - start))
    median = sorted(times)[2]
    if not quantiles:
        return median
    # A quiet machine: what lies far apart is not recorded.
    return [median * (1 + (q - 0.5) / 10) for q in quantiles]


class Ranges(threading.local):
    """The ranges of NVTX that a thread has pushed, from the outermost."""

    def __init__(self):
        self.pushed = []


ranges = Ranges()
started = []  # the ranges of NVTX that all threads see


def launch(name, **metrics):
    """Tell the stand-in for ncu of a kernel, and what it gives for metrics."""
    if file := os.environ.get("STAND_IN_LAUNCHES"):
        kernel = {"name": name, "pushed": ranges.pushed, "started": started}
        kernel |= metrics
        with open(file, "a") as launches:
            launches.write(json.dumps(kernel) + "\n")


class Changes(dict):
    """What is done to modules after their import, by name."""

    def find_spec(self, name, path=None, target=None):
        if not (change := self.pop(name, None)):
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec

    def make(self):
        sys.meta_path.insert(0, self)
        for name in self.keys() & sys.modules.keys():
            self.pop(name)(sys.modules[name])


@functools.cache
def count():
    """CUDA reads CUDA_VISIBLE_DEVICES when it is first asked."""
    return len(visible())


def is_available():
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"):
        return bool(visible())
    return count() > 0


def make_up_gpus(torch):
    torch.cuda.is_available = is_available
    torch._C._cuda_getDeviceCount = count
    torch.cuda.device_count = lambda: len(visible())
    torch.cuda.get_device_name = lambda *_: "NVIDIA Stand-in 100"
    torch.cuda.set_per_process_memory_fraction = lambda share: None
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda: None
    nvtx = torch.cuda.nvtx
    nvtx.range_push = lambda name: ranges.pushed.append(name)
    nvtx.range_pop = lambda: ranges.pushed.pop()
    nvtx.range_start = lambda name: started.append(name) or name
    nvtx.range_end = started.remove
    torch.cuda.nccl.version = lambda: (2, 99, 1)
    torch.version.cuda = "13.0"


def make_up_clock(testing):
    testing.do_bench = do_bench


def make_up_nodes():
    nodes = "/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"
    glob, exists = pathlib.Path.glob, pathlib.Path.exists

    def made_up_glob(self, pattern, **more):
        yield from glob(self, pattern, **more)
        yield from (
            pathlib.Path(node)
            for node in nodes
            if str(self) == "/dev" and pathlib.Path(node).match(pattern)
        )

    pathlib.Path.glob = made_up_glob
    pathlib.Path.exists = lambda self, **more: (
        str(self) in nodes or exists(self, **more)
    )


if visible():
    os.environ["TRITON_INTERPRET"] = "1"
    Changes({"torch": make_up_gpus, "triton.testing": make_up_clock}).make()
if visible() or os.environ.get("STAND_IN_NODES"):
    make_up_nodes()
