"""Build the site in its languages: ``python -m translation.build``.

English runs the tutorials. The others read what it has made of them, as soon
as its pages have been read, and are built beside each other. Then comes what
stands above all languages.

What stops a build is said in a sentence. The next one makes again whatever
did not come to its end: see incremental.py.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ended

import tutorial
from languages import ENGLISH, LANGUAGES, TRANSLATED
from translation import catalogs, root, update

BUILD = tutorial.BUILD
FEW_BYTES = 4 << 20  # on a disk with no more, that is why a build stopped


def doctrees(language):
    """Where Sphinx keeps what it has read."""
    return BUILD / "doctrees" / language.folder


def arguments(language):
    """What Sphinx is told for a language."""
    folders = "docs", str(root.SITE / language.folder)
    how = ["-n", "-W", "--keep-going", "-c", ".", "-d"]
    return [*how, str(doctrees(language)), *folders]


def sphinx(language, lock, **more):
    """Sphinx, started for a language. It holds the lock, too."""
    ended.begin(doctrees(language))
    return subprocess.Popen(
        [sys.executable, "-m", "sphinx", "-q", *arguments(language)],
        cwd=tutorial.ROOT,
        pass_fds=[lock.fileno(), *more.values()],
        start_new_session=True,  # which ends without a word: see below
        env=os.environ
        | {
            "SITE_LANGUAGE": language.code,
            "SITE_LANGUAGES": " ".join(each.code for each in LANGUAGES),
        }
        | {name: str(value) for name, value in more.items()},
    )


def stop(code):
    """End, and say what Sphinx may not have said."""
    if shutil.disk_usage(BUILD).free < FEW_BYTES:
        sys.exit(f"The disk that holds {BUILD} is full: make room.")
    for path in tutorial.MADE.rglob("*.running"):
        name = path.relative_to(tutorial.MADE).with_suffix("").as_posix()
        print(
            f"tutorials/{name}.py did not come to its end: it failed, or what "
            "reads its cells did, as the lines above say, or it called "
            "sys.exit or os._exit.",
            file=sys.stderr,
        )
    sys.exit(code)


def build(lock):
    """Build all languages, or end as the first that failed."""
    for language in TRANSLATED:
        catalogs.compile_all(language.code)
    seen, told = os.pipe()
    started = {ENGLISH: sphinx(ENGLISH, lock, PAGES_READ=told)}
    try:
        os.close(told)
        if os.read(seen, 1):  # or English has ended before
            for language in TRANSLATED:
                started[language] = sphinx(language, lock)
        codes = {each: process.wait() for each, process in started.items()}
    except BaseException:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        raise
    for language, code in codes.items():
        if code == 0 and not ended.complete(doctrees(language)):
            codes[language] = 1
    if failed := [code for code in codes.values() if code]:
        stop(failed[0])
    root.write(LANGUAGES)
    for line in update.summary():
        print(line)


@contextlib.contextmanager
def locked():
    """Let one build at a time work in this checkout."""
    must_write(BUILD)
    with open(BUILD / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another build runs in this checkout: this one waits.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def must_write(folder):
    """End with a sentence if a folder is not for writing, or one below it:
    whoever built as root has left such."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        sys.exit(f"{folder} must be a folder to write in: {error.strerror}.")
    for below, _, _ in os.walk(folder):
        if not os.access(below, os.W_OK | os.X_OK):
            sys.exit(f"{below} must be a folder to write in.")


def main():
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        must_write(Path(os.environ[name]))
    must_write(tutorial.MADE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with locked() as lock:
            build(lock)
    except KeyboardInterrupt:
        sys.exit("Interrupted: the next build makes again what is missing.")
    except OSError as error:
        sys.exit(f"The build stopped: {error}.")


if __name__ == "__main__":
    main()
