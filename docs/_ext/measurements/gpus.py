"""The GPUs of this machine, and processes that each see one of them."""

import os
import queue
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import joblib

from measurements import benchmarks, recording

# Files of the drivers through which torch may find a GPU: NVIDIA's (also on
# Jetson), AMD's, and that of WSL.
NODES = "nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg"


def there():
    """Whether something can be measured here, as torch says.

    To import it takes seconds: not where no GPU can be behind its answer.
    """
    if "torch" not in sys.modules and not any(
        found for name in NODES for found in Path("/dev").glob(name)
    ):
        return False
    import torch

    return torch.cuda.is_available()


def folder():
    """The name of this machine's GPU as recordings have it."""
    import torch

    return recording.slug(torch.cuda.get_device_name())


def usable():
    """The GPUs of the first one's kind, as CUDA_VISIBLE_DEVICES names them.

    Figures of one page must not come from different kinds.
    """
    import torch

    count = torch.cuda.device_count() if there() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    keys = given.split(",") if given else map(str, range(count))
    pairs = zip(keys, names, strict=False)  # given may name absent ones
    return [key.strip() for key, name in pairs if name == names[0]]


# torch then counts GPUs without a call of CUDA. Some of its modules count them
# when they are imported, and CUDA reads CUDA_VISIBLE_DEVICES only once.
ASK_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def take(names):
    """Let this process see these GPUs alone, before it has used any."""
    os.environ["CUDA_VISIBLE_DEVICES"] = names
    import torch

    seen = torch._C._cuda_getDeviceCount()
    if seen != len(names.split(",")):
        raise RuntimeError(
            f"a process that was given GPU {names} sees {seen} GPUs: "
            "something asked CUDA for them before"
        )


def lacking(script):
    """How many more GPUs than are here a script is measured with."""
    return max(benchmarks.gpus(script) - len(usable()), 0)


def shared():
    """All GPUs, as one name: what a tutorial of several GPUs sees."""
    return ",".join(usable())


def each(work, items, gpus, at_a_time=1):
    """work(item, gpu) for all items, in order, on the next free GPU.

    A GPU has so many at a time. Gives what work returned, in order.
    """
    free = queue.SimpleQueue()
    for _ in range(at_a_time):
        for gpu in gpus:
            free.put(gpu)

    def next_free(item):
        gpu = free.get()
        try:
            return work(item, gpu)
        finally:
            free.put(gpu)

    # Threads, for each of them only waits for a process of its own, which
    # sees one GPU and ends with all its memory.
    run = joblib.Parallel(
        len(gpus) * at_a_time, backend="threading", batch_size=1
    )
    return run(joblib.delayed(next_free)(item) for item in items)


class Children:
    """The processes that are running, to end them all when one thing fails."""

    def __init__(self):
        self.running = set()
        self.ended = False

    def start(self, command, env, **options):
        """A process with this in its environment, that finds these modules.

        It is a group of its own, to be ended with all that it starts.
        """
        env = os.environ | {"PYTHONPATH": path()} | env
        child = subprocess.Popen(
            command, env=env, text=True, process_group=0, **options
        )
        self.running.add(child)
        if self.ended:  # while this one was starting
            kill(child)
        return child

    def end(self):
        self.ended = True
        for child in list(self.running):
            kill(child)
        for child in list(self.running):
            child.wait()


def kill(child):
    """End a process of ours and all that it has started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def path():
    """Where the children find these modules."""
    here = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


@contextmanager
def children():
    """Processes that do not outlive this one, however it ends.

    Ctrl+C and SIGTERM reach this one alone.
    """

    def stop(*_):
        raise KeyboardInterrupt

    found = Children()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield found
    finally:
        found.end()
        signal.signal(signal.SIGTERM, before)
