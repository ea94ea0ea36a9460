"""What the pages beside the tutorials say: as Sphinx translates them.

From the documents of the English build, so that no build of another kind is
needed.
"""

import pickle
import sys

from sphinx.util.nodes import extract_messages

from languages import ENGLISH
from translation import stage

READ = stage.doctrees(ENGLISH)


def messages(name):
    """The messages of a page, in its order."""
    file = READ / f"{name}.doctree"
    if not file.exists():
        sys.exit(f"{file} is missing: make html writes it")
    doctree = pickle.loads(file.read_bytes())
    return [text for _, text in extract_messages(doctree)]
