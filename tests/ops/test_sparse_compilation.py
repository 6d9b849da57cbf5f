"""Kernels compile for a Hopper GPU, where there is none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton")

# Bytes of a thread's stack: two programs share a multiprocessor then, which is faster than one without.
SPILLED = {"_key_backward": 40}
SHARED_MEMORY = 227 * 1024  # bytes that a program may take


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's compiler for GPUs is not everywhere")
def test_every_sparse_kernel_compiles(triton_cache: Path) -> None:
    """None with more registers spilled than it should, or more shared memory than there is."""
    env = os.environ | {"TRITON_CACHE_DIR": str(triton_cache), "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_sparse_kernels.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    launched = [line.split() for line in done.stdout.splitlines()]
    names = {"_spmm_rows", "_spmm_pieces", "_add_pieces", "_sddmm_rows", "_sddmm_pieces", "_softmax"}
    names |= {"_softmax_backward", "_sdd", "_dsd", "_attend", "_query_backward", "_key_backward"}
    names |= {"_multiply", "_advance", "_turn"}
    assert {name for name, *_ in launched} == names
    for name, dtype, spilled, shared in launched:
        assert int(spilled) <= SPILLED.get(name, 0), (name, dtype)
        assert int(shared) <= SHARED_MEMORY, (name, dtype)
