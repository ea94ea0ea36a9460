"""Notebooks that Sphinx-Gallery writes, with cells of ours."""

from contextlib import contextmanager
from unittest import mock

from sphinx_gallery import gen_rst


@contextmanager
def changed(*changes):
    """Each change is called with each cell of what is written meanwhile."""
    original = gen_rst.jupyter_notebook

    def jupyter_notebook(*args):
        notebook = original(*args)
        for cell in notebook["cells"]:
            for change in changes:
                change(cell)
        return notebook

    with mock.patch.object(gen_rst, "jupyter_notebook", jupyter_notebook):
        yield
