"""Processes that do not outlive this one, however it ends."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


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


def beside(running, work, items, at_a_time):
    """work(item) for all items, so many beside each other; what they gave.

    In threads, for each of them only waits for a process of its own.
    """
    with ThreadPoolExecutor(at_a_time) as threads:
        try:
            return list(threads.map(work, items))
        except BaseException:  # Ctrl+C, too: then nobody waits for the others
            threads.shutdown(wait=False, cancel_futures=True)
            running.end()
            raise


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
    """Ctrl+C and SIGTERM reach this process alone, which ends the others."""

    def stop(*_):
        raise KeyboardInterrupt

    found = Children()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield found
    finally:
        found.end()
        signal.signal(signal.SIGTERM, before)
