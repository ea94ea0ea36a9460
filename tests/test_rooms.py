"""The rooms of docs/_ext: import-linter proves that imports run down only,
but looks into packages; these are the two modules under them."""

import ast
from pathlib import Path

import pytest

import style
import tutorial


@pytest.mark.parametrize("module", [style, tutorial])
def test_the_lowest_modules_import_nothing_of_ours(module):
    path = Path(module.__file__)
    ours = {file.stem for file in path.parent.iterdir()}
    assert {"gallery", "page", "compiled", "measurements"} <= ours
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported & ours == set()
