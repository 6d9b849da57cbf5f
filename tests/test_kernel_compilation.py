"""Kernels compile for a GPU that isn't there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

KERNELS = {
    "_diffuse_kernel",
    "_project_kernel",
    "_evaluate_kernel",
    "_sum_spans_kernel",
    "_forward_kernel",
    "_backward_kernel",
    "_kernel",
    "_linear_kernel",
    "_activation_backward_kernel",
}


# Compute capabilities, and the KB of shared memory that a program may have there.
@pytest.mark.parametrize(("capability", "shared_kb"), [(90, 227), (89, 99)])
def test_kernels_compile(tmp_path: Path, capability: int, shared_kb: int) -> None:
    pytest.importorskip("triton")
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    for arithmetic in ("bf16", "tf32"):
        assert {name.split()[0] for name, kind, _ in rows if kind == arithmetic} == KERNELS
    assert all(int(shared) <= shared_kb * 1024 for *_, shared in rows), done.stdout
