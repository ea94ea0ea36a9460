"""What the cells of a tutorial gave is kept: after a change to its prose they
need not run again; and in other languages than English they never run.

Sphinx-Gallery looks at the whole script. Here its cells count, its title,
which pictures show, and what else the page was made from: ``inputs``.
"""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from sphinx.errors import ExtensionError
from sphinx_gallery import gen_rst
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

from languages import CURRENT, ENGLISH


@contextmanager
def kept(script, target, inputs):
    """Cells give what they gave, or run; whether they run is told.

    ``target`` is the script that Sphinx-Gallery made: what its cells drew lies
    beside it, so what they gave does too.
    """
    file = Path(target).with_suffix(".outputs")
    key = digest(script, inputs)
    own = CURRENT is ENGLISH
    known = read(file, key) if own else of_english(script, file)
    given, made = iter(known or ()), []
    execute = gen_rst.execute_code_block

    def execute_code_block(compiler, block, *args):
        if block.type == "text":
            return ""
        if known is not None:
            return next(given)
        made.append(execute(compiler, block, *args))
        return made[-1]

    changes = {"execute_code_block": execute_code_block}
    if known is not None:  # what names in the code mean is kept as well
        changes["_get_backreferences"] = lambda conf, *_: (
            gen_rst._read_cached_backrefs(conf, Path(target))
        )
    with mock.patch.multiple(gen_rst, **changes):
        if own:
            file.unlink(missing_ok=True)  # until all of it is known right

        def keep():
            if own:
                kept = {"key": key, "outputs": known or made}
                file.write_text(json.dumps(kept))

        yield known is None, keep


def of_english(script, file):
    """What the cells gave in English; the cells are the same, in number."""
    _, blocks = split_code_and_text_blocks(str(script))
    cells = sum(block.type == "code" for block in blocks)
    outputs = json.loads(file.read_text())["outputs"]
    if len(outputs) != cells:
        raise ExtensionError(
            f"{script}: {cells} cells of code, and the English page has "
            f"{len(outputs)}: its catalog changes where a cell ends"
        )
    return outputs


def digest(script, inputs):
    """A hash of all that the outputs of a script depend on."""
    _, blocks = split_code_and_text_blocks(str(script))
    _, title = gen_rst.extract_intro_and_title(script, blocks[0].content)
    cells = [block.content for block in blocks if block.type == "code"]
    return hashlib.sha256(repr([cells, title, inputs]).encode()).hexdigest()


def read(file, key):
    """The outputs that a file keeps, if they are those of the key."""
    try:
        found = json.loads(file.read_text())
        return found["outputs"] if found["key"] == key else None
    except (OSError, ValueError, KeyError):
        return None
