"""The walkthroughs in CONTRIBUTING.md, and the examples in docstrings. `make docs` runs the examples of pages."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from rooms import ROOMS, ROOT, modules, parsed
from shapes import ellipsoid

from diffnet import geometry
from diffnet.data import FEATURE_CHANNELS, Sample, augmented, feature_names, input_features
from diffnet.geometry import descriptors, make_mesh, precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def blocks(title: str) -> list[str]:
    """The blocks of a walkthrough."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(rf"^## Walkthrough: {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    return [dedent(block) for block in re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)]


def test_the_new_descriptor_is_a_feature_also_of_scaled_meshes(
    monkeypatch: pytest.MonkeyPatch, sphere: trimesh.Trimesh
) -> None:
    function, entry, test = blocks("add a descriptor")
    room: dict[str, Any] = dict(vars(descriptors))
    exec(function, room)
    monkeypatch.setattr(geometry, "gps_norm", room["gps_norm"], raising=False)
    for name, kind in eval(f"{{{entry}}}", dict(vars(feature_names))).items():
        monkeypatch.setitem(feature_names.KINDS, name, kind)
        monkeypatch.setitem(FEATURE_CHANNELS, name, kind.channels)
    room |= {"trimesh": trimesh, "precompute": precompute, "np": np}
    exec(test, room)
    room["test_gps_norm_against_a_loop"](sphere)

    def sample(factor: float, parts: str) -> Sample:
        mesh = make_mesh(ellipsoid(0).verts * factor, ellipsoid(0).faces)
        operators = precompute(mesh, k=10)
        return Sample(("",), input_features(mesh, operators, parts), torch.zeros(42, dtype=torch.int64), operators)

    for parts in ("gps-norm", "xyz+gps-norm"):
        expected = sample(1.25, parts).features
        found = augmented(sample(1.0, parts), parts, factors=torch.tensor([1.25])).features
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_new_op_in_a_copy_of_the_checkout(tmp_path: Path) -> None:
    """Its test passes, the house rules hold, its launches and its benchmark run."""
    ignored = shutil.ignore_patterns("__pycache__", "results")
    for folder in (*ROOMS, "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    *files, launches, benchmark = blocks("add an op with a kernel")
    new = [*(f"ops/scale_rows/{name}.py" for name in ("reference", "kernels", "op", "__init__"))]
    new += ["tests/ops/test_scale_rows.py", "benchmarks/cases/scale_rows.py"]
    (tmp_path / "ops/scale_rows").mkdir()
    for name, text in zip(new, [*files, benchmark], strict=True):
        (tmp_path / name).write_text(text)
    exported = 'from diffnet.ops.scale_rows.op import scale_rows\n\n__all__ = ["scale_rows",'
    names = tmp_path / "ops/__init__.py"
    before, after = names.read_text().split("__all__ = [", 1)
    names.write_text(f"{before}{exported}{after}")
    # Launches of a few rows, in the interpreter.
    small = "_empty = lambda *shape, dtype: torch.zeros(2, *shape[1:], dtype=dtype)"
    setup = "import torch\nfrom diffnet.ops.scale_rows import kernels as scale_rows\n"
    setup += f"dtype, WIDTHS = torch.float32, [[5]]\n{small}\n"
    bench = "-m diffnet.benchmarks scale-rows --device cpu --vertices 100 --seconds 0 --no-compile --out out"
    tests = "-m pytest -q -p no:cacheprovider tests/ops/test_scale_rows.py tests/packaging/test_house_rules.py"
    for command in (tests.split(), bench.split(), ["-c", setup + launches]):
        how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}}
        run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, **how)
        assert run.returncode == 0, run.stdout + run.stderr


# ---- examples in docstrings run and show the results that they print ----


FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [name for name, path in modules().items() if ">>> " in path.read_text()]


@pytest.fixture
def default_printing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arrays print as in a new session, and an example that writes a file writes it to a temporary folder."""
    torch.set_printoptions(profile="default")
    np.set_printoptions(precision=8, threshold=1000, suppress=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("default_printing")
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
