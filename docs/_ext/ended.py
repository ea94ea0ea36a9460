"""Whether a build of a language came to its end: a file in the folder where
Sphinx keeps what it has read says so, written when all else is.

Sphinx notes that it is *ready*, behind all who listen to the end of a build.
Who has started Sphinx makes that *complete* if it ended without a warning.
"""

READY, COMPLETE = "ready", "complete"


def known(folder):
    """How the site was made when a build came to its end; "" if none did."""
    file = folder / COMPLETE
    return file.read_text() if file.exists() else ""


def begin(folder):
    """Before Sphinx starts: a build before, which was not well, is no sign."""
    (folder / READY).unlink(missing_ok=True)


def forget(folder):
    """Before anything is read or written."""
    (folder / COMPLETE).unlink(missing_ok=True)


def ready(folder, made_by):
    (folder / READY).write_text(made_by)


def complete(folder):
    """Note that the build has ended well; False if it did not get there."""
    if not (folder / READY).exists():
        return False
    (folder / READY).replace(folder / COMPLETE)
    return True
