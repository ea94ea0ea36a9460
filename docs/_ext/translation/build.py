"""Build the site in its languages: ``python -m translation.build``.

English runs the tutorials. The others read what it has made of them, as soon
as its pages have been read, and are built beside each other. Then comes what
stands above all languages.

All is read and written anew, in a folder of its own, which takes the place of
the site when everything has ended well: so a build that is interrupted or
fails leaves the site as it was. What a tutorial made when it ran is kept, and
so is what was compiled: see gallery.py and compiled/kept.py.

What stops a build is said in a sentence.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import tutorial
from languages import ENGLISH, LANGUAGES, TRANSLATED
from translation import catalogs, root, update

BUILD = tutorial.BUILD
UNFINISHED = BUILD / "unfinished"
FEW_BYTES = 4 << 20  # on a disk with no more, that is why a build stopped


def arguments(language):
    """What Sphinx is told for a language: to know nothing of builds before."""
    how = ["-E", "-n", "-W", "--keep-going", "-c", ".", "-d"]
    how.append(str(BUILD / "doctrees" / language.folder))
    return [*how, "docs", str(UNFINISHED / language.folder)]


def sphinx(language, lock, **more):
    """Sphinx, started for a language. It holds the lock, too."""
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
    for path in unended():
        name = path.relative_to(tutorial.MADE).with_suffix("").as_posix()
        print(
            f"tutorials/{name}.py did not come to its end: it failed, or what "
            "reads its cells did, as the lines above say, or it called "
            "sys.exit or os._exit.",
            file=sys.stderr,
        )
    sys.exit(code)


def unended():
    """The marks of tutorials that did not come to their end."""
    return list(tutorial.MADE.rglob("*.running"))


def build(lock):
    """Build all languages, or end as the first that failed."""
    remove(UNFINISHED)
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
    if failed := [code for code in codes.values() if code]:
        stop(failed[0])
    if unended():  # os._exit(0) says that all is well
        stop(1)
    root.write(LANGUAGES, UNFINISHED)
    put_in_place()
    for line in update.summary():
        print(line)


def put_in_place():
    """Let what was built be the site."""
    before = BUILD / "before"
    remove(before)
    if root.SITE.exists():
        root.SITE.rename(before)
    UNFINISHED.rename(root.SITE)
    remove(before)


def remove(folder):
    if folder.exists():
        shutil.rmtree(folder)


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
    if not re.fullmatch(r"https?://\S+/", root.ADDRESS):
        sys.exit(
            f"SITE_URL={root.ADDRESS}: it must begin with http:// or https:// "
            "and end with a slash"
        )
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        must_write(Path(os.environ[name]))
    must_write(tutorial.MADE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with locked() as lock:
            build(lock)
    except KeyboardInterrupt:
        sys.exit("Interrupted: the site is as it was.")
    except OSError as error:
        sys.exit(f"The build stopped: {error}.")


if __name__ == "__main__":
    main()
