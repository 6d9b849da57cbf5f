"""Kernels compile, and networks launch them, for a GPU that isn't there. Kernels have names of one form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton")

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.launched_kernels import check_coverage, package_kernels

DENSE_KERNELS = {
    "cross_entropy_backward_kernel",
    "cross_entropy_forward_kernel",
    "diffuse_backward_kernel",
    "diffuse_forward_kernel",
    "diffusion_features_forward_spectrum_kernel",
    "evaluate_forward_kernel",
    "functional_map_forward_factor_kernel",
    "gradient_features_backward_kernel",
    "gradient_features_forward_kernel",
    "mlp_backward_hopper_kernel",
    "mlp_backward_kernel",
    "mlp_backward_weights_kernel",
    "mlp_forward_hopper_kernel",
    "mlp_forward_kernel",
    "mlp_forward_linear_kernel",
    "operands_forward_kernel",
    "project_forward_kernel",
    "spectral_gradient_features_backward_coefficients_kernel",
    "spectral_gradient_features_backward_kernel",
    "spectral_gradient_features_forward_kernel",
    "spectral_gradient_features_forward_table_kernel",
    "sum_spans_forward_kernel",
}
# Where float32 numbers have several parts, two kernels replace one.
BACKWARD = {"spectral_gradient_features_backward_kernel"}
BACKWARD_IN_PARTS = {
    "tf32": {
        "spectral_gradient_features_backward_derivatives_kernel",
        "spectral_gradient_features_backward_sums_kernel",
    },
    "fp32": {
        "spectral_gradient_features_backward_derivatives_kernel",
        "spectral_gradient_features_backward_sum_kernel",
    },
}
ONE_WIDTH = {"mlp_forward_kernel", "mlp_backward_kernel"}  # an MLP in one kernel, on GPUs with much shared memory
DENSE_TYPES = {"bfloat16 ieee", "float16 ieee", "float32 bf16x3", "float32 bf16x6"}
SPARSE_TYPES = {f"{dtype} {index}" for dtype in ("float32", "bfloat16", "float16") for index in ("int32", "int64")}
SPILLED = {"spmm_forward_rows_kernel": 64}  # bytes for each thread
PROCESS = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
EVERY_STEP = {
    "evaluate_forward_kernel",
    "mlp_backward_weights_kernel",
    "mlp_forward_linear_kernel",
    "operands_forward_kernel",
    "project_forward_kernel",
    "sum_spans_forward_kernel",
}
SPECTRAL_GRADIENT = {
    *BACKWARD,
    "diffusion_features_forward_spectrum_kernel",
    "spectral_gradient_features_backward_coefficients_kernel",
    "spectral_gradient_features_forward_kernel",
    "spectral_gradient_features_forward_table_kernel",
}
SPARSE_GRADIENT = {
    "diffuse_backward_kernel",
    "diffuse_forward_kernel",
    "gradient_features_backward_kernel",
    "gradient_features_forward_kernel",
}


def in_arithmetic(kernels: set[str], arithmetic: str) -> set[str]:
    """The kernels that compute these results in bf16, tf32 or fp32."""
    split = arithmetic in BACKWARD_IN_PARTS and kernels >= BACKWARD
    return kernels - BACKWARD | BACKWARD_IN_PARTS[arithmetic] if split else kernels


def run(script: str, cache: Path, *arguments: str) -> str:
    """The output of a script of this folder, in a process without the interpreter."""
    env = PROCESS | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """One tile of each kernel and dtype, as `python -m diffnet.benchmarks.compile_kernels` compiles all tiles."""
    command = [sys.executable, "-m", "diffnet.benchmarks.compile_kernels", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, env=PROCESS, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_csv(tmp_path / "kernels.csv")
    assert {row["kernel"] for row in rows} == set(package_kernels())
    for name, types in {"project_forward_kernel": DENSE_TYPES, "sddmm_forward_rows_kernel": SPARSE_TYPES}.items():
        assert {row["types"] for row in rows if row["kernel"] == name} == types
    for row in rows:  # registers that spill cost these kernels, which wait for memory, more than others
        if row["kernel"].startswith(("spmm", "sddmm", "sparse", "implicit")):
            assert int(row["stack"]) <= SPILLED.get(row["kernel"], 0), row


def test_a_kernel_without_a_launch_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no launch reaches spmm_forward_rows_kernel; add one to"):
        check_coverage(set(package_kernels()) - {"spmm_forward_rows_kernel"}, 80)


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("compile",), marks=pytest.mark.slow)], ids=["launched", "compiled"]
)
def test_a_training_step_stays_on_the_gpu(triton_cache: Path, arguments: tuple[str, ...]) -> None:
    """A step launches the expected kernels, reads nothing back and copies nothing to the GPU."""
    steps = [json.loads(line) for line in run("step_without_gpu.py", triton_cache, *arguments).splitlines()]
    assert [arithmetic for arithmetic, *_ in steps] == ["tf32"] * 4 + ["fp32"] * 4 + ["bf16"] * 4
    dense = DENSE_KERNELS.union(*BACKWARD_IN_PARTS.values())
    for arithmetic, options, launched in steps:
        sparse, attention = "gradient" in options, "attention_heads" in options
        expected = EVERY_STEP | (SPARSE_GRADIENT if sparse else SPECTRAL_GRADIENT)
        expected |= set() if attention else ONE_WIDTH - ({"mlp_backward_kernel"} if arithmetic == "fp32" else set())
        assert set(launched) & dense == in_arithmetic(expected, arithmetic), options
        others = " ".join(set(launched) - dense)
        for part in ("spmm", "sddmm", "softmax"):
            assert (part in others) == (attention or (sparse and part == "spmm")), (part, options)


def test_names_of_kernels() -> None:
    """<op>_<forward|backward>[_part]_kernel"""
    names = set(package_kernels())
    assert names >= DENSE_KERNELS
    assert all(re.fullmatch(r"[a-z]\w*_(forward|backward)(_\w+)?_kernel", name) for name in names)
