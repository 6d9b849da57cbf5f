"""Kernels that are compiled while meshes are preprocessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffnet.data import LabeledMesh, LabeledMeshes, figures, make_sample
from diffnet.train.batches import keep_on_device
from diffnet.train.device import matmul_dtype
from diffnet.train.loop import train
from diffnet.train.options import TrainOptions
from diffnet.train.steps.compilation import compile_step, compiled_meanwhile


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, {"precision": "fp32"}, {"features": "xyz+normals"}])
def test_a_run_compiles_nothing_more(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No step and no evaluation does, on meshes of other sizes. Only sums of partial results have variants by size."""
    from triton import knobs

    compiled: list[str] = []

    def record(*_: object, repr: str, **__: object) -> None:
        compiled.append(repr)

    device = torch.device("cuda")
    options = TrainOptions(**{"k": 32, "width": 48, "blocks": 2, "epochs": 2, **given})
    data = figures(train=4, test=2)
    samples = [make_sample(item, options.preprocessing) for item in (*data.train, *data.test)]
    samples = keep_on_device(samples, device, matmul_dtype(options.precision, device))
    with compiled_meanwhile(data, options, device):
        pass
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", record)
    train(data, samples[:4], samples[4:], options, tmp_path, device=device)
    assert [kernel for kernel in compiled if not kernel.startswith("sum_spans")] == []


@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "meshes"])
def test_labels_of_all_kinds(at: Any) -> None:
    """The step runs on a sphere with labels of the data set's dtype. Nothing is compiled on the CPU."""
    mesh = figures(train=1, test=1).train[0].mesh
    labels = torch.zeros(() if at == "meshes" else 7, dtype=torch.int64).numpy()
    data = LabeledMeshes([LabeledMesh("one", mesh, labels)], [], ["a", "b"], at)
    task = "classification" if at == "meshes" else "segmentation"
    compile_step(data, TrainOptions(task=task, k=8, width=8, blocks=1), torch.device("cpu"))
