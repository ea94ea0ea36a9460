"""In docs/_ext imports run down only, as pyproject.toml says."""

import ast
from pathlib import Path

import pytest
from importlinter.cli import lint_imports
from project import ROOT

import languages
import modules
import style
import tutorial
import words_later


def test_the_contracts_of_import_linter_are_kept():
    settings = str(ROOT / "pyproject.toml")
    assert lint_imports(settings, no_cache=True) == 0


@pytest.mark.parametrize(
    "module", [style, tutorial, languages, modules, words_later]
)
def test_the_lowest_modules_import_nothing_of_ours(module):
    """import-linter looks into packages only."""
    path = Path(module.__file__)
    ours = {file.stem for file in path.parent.iterdir()}
    assert {"gallery", "page", "compiled", "measurements"} <= ours
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported & ours <= {"languages", "words_later"} - {path.stem}
