"""Kernels compile, and networks launch them, for a GPU that isn't there. Steps launch few. Names have one form."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from diffnet import DiffusionNet, collate, graphed, precompute
from diffnet.ops import cross_entropy

pytest.importorskip("triton")

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.launched_kernels import check_coverage, package_kernels

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
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
PROCESS = os.environ | {"PYTHONPATH": PATHS, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
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
DIFFUSION = {"diffuse_backward_kernel", "diffuse_forward_kernel"}
SPARSE_GRADIENT = DIFFUSION | {"gradient_features_backward_kernel", "gradient_features_forward_kernel"}


def in_arithmetic(kernels: set[str], arithmetic: str) -> set[str]:
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
    assert [arithmetic for arithmetic, *_ in steps] == ["tf32"] * 5 + ["fp32"] * 5 + ["bf16"] * 5
    for arithmetic, options, launched in steps:
        sparse, attention = "gradient" in options, "attention_heads" in options
        expected = EVERY_STEP | (SPARSE_GRADIENT if sparse else SPECTRAL_GRADIENT)
        expected |= {
            name for name in package_kernels() if name.startswith("global_tokens") and "global_tokens" in options
        }
        if attention:  # no node for the whole block
            expected = expected - {"diffusion_features_forward_spectrum_kernel"} | DIFFUSION
        expected |= set() if attention else ONE_WIDTH - ({"mlp_backward_kernel"} if arithmetic == "fp32" else set())
        others = {name for name in launched if any(part in name for part in ("spmm", "sddmm", "softmax"))}
        assert set(launched) - others == in_arithmetic(expected, arithmetic), options
        for part in ("spmm", "sddmm", "softmax"):
            assert (part in " ".join(others)) == (attention or (sparse and part == "spmm")), (part, options)


def test_names_of_kernels() -> None:
    """<op>_<forward|backward>[_part]_kernel"""
    names = set(package_kernels())
    assert names >= EVERY_STEP | SPECTRAL_GRADIENT | SPARSE_GRADIENT | ONE_WIDTH
    assert all(re.fullmatch(r"[a-z]\w*_(forward|backward)(_\w+)?_kernel", name) for name in names)


BLOCKS = 4


@pytest.fixture(scope="module")
def costs(triton_cache: Path) -> dict[str, Any]:
    return json.loads(run("step_costs.py", triton_cache))


def test_launches_of_a_training_step(costs: dict[str, Any]) -> None:
    """A block's forward is 5 kernels, its backward 6. The rest are two linear layers, the loss and all conversions."""
    kernels, pytorch = Counter(costs["kernels"]), Counter(costs["pytorch"])
    assert kernels["sum_spans_forward_kernel"] == BLOCKS + 2
    assert kernels["operands_forward_kernel"] == 1
    assert kernels["mlp_backward_weights_kernel"] == BLOCKS + 2
    assert kernels["project_forward_kernel"] == BLOCKS  # those of the backward are launched with the weights
    assert kernels.total() == 11 * BLOCKS + 10
    # On the CPU labels are also checked, which a GPU does not do.
    checks = Counter(["lt", "ge", "bitwise_or", "ne", "bitwise_and", "any", "_local_scalar_dense"])
    expected = {"_foreach_clamp_min_": 1, "randint": 1, "_to_copy": 1, "mean": 1, "ones_like": 1, "div": 1}
    assert pytorch - checks == Counter(expected)
    assert kernels.total() + sum(expected.values()) <= 60


def test_other_batches_compile_nothing(costs: dict[str, Any]) -> None:
    """Once a single mesh and a batch of two have been seen, for widths that are multiples of 16 and for others."""
    for found in costs["variants"]:
        kernels = {name: counts for name, counts in found.items() if not name.startswith("spmm")}
        assert len(kernels) > 12
        assert {name: again for name, (_, again) in kernels.items() if again} == {}


@pytest.mark.gpu
def test_other_sizes_compile_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import trimesh
    from triton import knobs

    compiled: list[str] = []

    def record(*_: object, repr: str, **__: object) -> None:
        compiled.append(repr)

    def step(*meshes: trimesh.Trimesh) -> int:
        operators = collate([precompute(mesh, k=16) for mesh in meshes]).to("cuda").with_gradient_evecs()
        x = torch.randn(operators.num_vertices, 3, device="cuda")
        compiled.clear()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x, operators)
        cross_entropy(out, torch.zeros(len(x), dtype=torch.int64, device="cuda")).mean().backward()
        return len(compiled)

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", record)
    model = DiffusionNet(3, 7, width=36, blocks=1, gradient="spectral").cuda()
    meshes = [trimesh.creation.cone(1, 2, sections=40 + n) for n in range(5)]
    assert step(meshes[0]) + step(*meshes[:2]) > 20
    assert [step(mesh) for mesh in meshes] == [0] * 5
    assert [step(*meshes[:n]) for n in (3, 4, 5)] == [0] * 3


def test_kernels_are_compiled_ahead_once_each_and_not_run(costs: dict[str, Any]) -> None:
    found = costs["ahead"]
    assert found["ran"] == found["more"] == 0
    # The sizes of converted matrices tell launches apart that Triton compiles once.
    assert 15 < found["different"] <= found["compiled"] <= found["different"] + 1


@pytest.mark.gpu
def test_a_graphed_network_compiles_its_kernels_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first call, which runs without graphs, and for the recording. Sparse kernels are compiled as usual."""
    import threading

    import trimesh
    from triton import knobs

    here: list[str] = []
    elsewhere: list[str] = []

    def record(*_: object, repr: str, **__: object) -> None:
        (here if threading.current_thread() is threading.main_thread() else elsewhere).append(repr)

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", record)
    operators = precompute(trimesh.creation.icosphere(2), k=16).to("cuda")
    x = torch.randn(operators.num_vertices, 3, device="cuda")
    plain = DiffusionNet(3, 7, width=44, blocks=2, dropout=0.0).cuda()
    model = graphed(copy.deepcopy(plain))
    outs = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            outs.append(model(x, operators))
        outs[-1].float().square().mean().backward()
    assert elsewhere
    assert [name for name in here if "spmm" not in name] == []
    with torch.autocast("cuda", torch.bfloat16):
        expected = plain(x, operators)
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.gpu
def test_launches_go_to_the_compiled_kernel() -> None:
    """Other sizes take the same one. Pointers that are not aligned take another."""
    from diffnet.ops.cross_entropy.kernels import cross_entropy_forward_kernel

    def check(rows: int, offset: int) -> int:
        logits = torch.randn(rows * 12 + offset, device="cuda")[offset:].view(rows, 12)
        labels = torch.randint(12, (rows,), device="cuda")
        for _ in range(2):
            expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            torch.testing.assert_close(cross_entropy(logits, labels), expected)
        return len(cross_entropy_forward_kernel.compiled)

    first = check(100, 0)
    assert first > 0
    assert check(1, 0) == check(1000, 0) == first
    assert check(64, 1) == check(63, 3) == first + 1
