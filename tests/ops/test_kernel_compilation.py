"""Kernels compile, and networks launch them, for a GPU that isn't there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

KERNELS = {
    "_cross_entropy_kernel",
    "_diffuse_kernel",
    "_project_kernel",
    "_evaluate_kernel",
    "_sum_spans_kernel",
    "_forward_kernel",
    "_backward_kernel",
    "_kernel",
    "_operands_kernel",
    "_linear_kernel",
    "_layers_kernel",
    "_layers_backward_kernel",
    "_weight_kernel",
    "_sum_and_diffuse_kernel",
    "_table_kernel",
    "_spectrum_gradient_kernel",
    "_matrix_gradients_kernel",
}
ALWAYS = {
    *("_project_kernel", "_evaluate_kernel", "_sum_spans_kernel"),
    *("_operands_kernel", "_linear_kernel", "_weight_kernel"),
}
ON_BASIS = {
    *("_sum_and_diffuse_kernel", "_table_kernel", "_forward_kernel"),
    *("_backward_kernel", "_spectrum_gradient_kernel", "_matrix_gradients_kernel"),
}
ONE_WIDTH = {"_layers_kernel", "_layers_backward_kernel"}  # of up to three inputs of an MLP
SPARSE = {"_diffuse_kernel", "_kernel", "_spmm_rows"}
ATTENTION = {"_spmm_rows", "_sddmm_rows", "_softmax", "_softmax_backward"}


def in_parts(kernels: set[str]) -> set[str]:
    """These where float32 is taken in two parts: one backward is two kernels."""
    if "_backward_kernel" in kernels:
        kernels = kernels - {"_backward_kernel"} | {"_derivatives_kernel", "_sums_kernel"}
    return kernels


def run(script: str, cache: Path, *arguments: str) -> str:
    """What a script of this folder prints, in a process without the interpreter."""
    pytest.importorskip("triton")
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Compute capabilities, and the shared memory in KB that a program may use on such a GPU.
@pytest.mark.parametrize(
    ("capability", "shared_kb"), [(90, 227), pytest.param(89, 99, marks=pytest.mark.slow)], ids=["sm90", "sm89"]
)
@pytest.mark.parametrize("arithmetic", ["bf16", "tf32"])
def test_kernels_compile(triton_cache: Path, arithmetic: str, capability: int, shared_kb: int) -> None:
    done = run("compile_kernels.py", triton_cache, str(capability), arithmetic)
    rows = [line.rsplit(maxsplit=1) for line in done.splitlines()]
    kernels = KERNELS if shared_kb > 99 else KERNELS - ONE_WIDTH
    expected = in_parts(kernels) if arithmetic == "tf32" else kernels
    assert {name.split()[0] for name, _ in rows} == expected
    if arithmetic == "tf32":
        # Where tf32 is allowed, products take float32 in two bfloat16 parts. Other kernels contain no products.
        assert {name.partition(" ")[2] for name, _ in rows} == {"bf16x3", ""}
    assert all(int(shared) <= shared_kb * 1024 for _, shared in rows), done


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("compile",), marks=pytest.mark.slow)], ids=["launched", "compiled"]
)
def test_a_training_step_stays_on_the_gpu(triton_cache: Path, arguments: tuple[str, ...]) -> None:
    """A step launches the expected kernels, reads nothing back and copies nothing to the GPU."""
    steps = [json.loads(line) for line in run("step_without_gpu.py", triton_cache, *arguments).splitlines()]
    assert [arithmetic for arithmetic, *_ in steps] == ["tf32"] * 4 + ["bf16"] * 4
    for arithmetic, options, launched in steps:
        gradients = SPARSE if "gradient" in options else ON_BASIS
        expected = ALWAYS | gradients | (ATTENTION if "attention_heads" in options else ONE_WIDTH)
        assert set(launched) == (in_parts(expected) if arithmetic == "tf32" else expected), options
