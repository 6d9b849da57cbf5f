"""Sparse kernels compile for a Hopper GPU, without a GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton")

# Bytes of spilled registers per thread. With this limit on registers, two programs fit on one multiprocessor, which is
# faster than one program without spilling.
SPILLED = {"block_attention_backward_key_kernel": 40}
SHARED_MEMORY = 227 * 1024  # the bytes that a program may use
KERNELS = {
    "spmm_forward_rows_kernel",
    "spmm_forward_pieces_kernel",
    "spmm_forward_add_pieces_kernel",
    "sddmm_forward_rows_kernel",
    "sddmm_forward_pieces_kernel",
    "sparse_softmax_forward_kernel",
    "sparse_softmax_backward_kernel",
    "block_sdd_forward_kernel",
    "block_dsd_forward_kernel",
    "block_softmax_forward_kernel",
    "block_softmax_backward_kernel",
    "block_attention_forward_kernel",
    "block_attention_backward_query_kernel",
    "block_attention_backward_key_kernel",
    "implicit_solve_forward_multiply_kernel",
    "implicit_solve_forward_update_kernel",
    "implicit_solve_forward_direction_kernel",
}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's compiler for GPUs is not everywhere")
def test_every_sparse_kernel_compiles(triton_cache: Path) -> None:
    """No kernel spills registers beyond its limit or uses more shared memory than there is."""
    env = os.environ | {"TRITON_CACHE_DIR": str(triton_cache), "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_sparse_kernels.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    launched = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in launched} == KERNELS
    for name, dtype, spilled, shared in launched:
        assert int(spilled) <= SPILLED.get(name, 0), (name, dtype)
        assert int(shared) <= SHARED_MEMORY, (name, dtype)
