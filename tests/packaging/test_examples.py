"""The examples in docstrings run and show the results that they print. `make docs` runs those of pages."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from rooms import modules, parsed

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [name for name, path in modules().items() if ">>> " in path.read_text()]


@pytest.fixture(autouse=True)
def default_printing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arrays print as in a new session, and an example that writes a file writes it to a temporary folder."""
    torch.set_printoptions(profile="default")
    np.set_printoptions(precision=8, threshold=1000, suppress=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    path = modules()[module]
    # torch.compile adds copies of compiled functions to a module, with their docstrings. They are no part of the file.
    own = {module} | {
        f"{module}.{node.name}" for node in parsed(path).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder().find(importlib.import_module(module)):
        if test.name in own or test.name.rpartition(".")[0] in own - {module}:
            runner.run(test)
    assert runner.summarize(verbose=False) == (0, examples_in(path))


def examples_in(path: Path) -> int:
    """The number of examples in the docstrings of a file, found without importing it."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(parsed(path)) if isinstance(node, documented)]
    return sum(len(doctest.DocTestParser().get_examples(docstring)) for docstring in docstrings)
