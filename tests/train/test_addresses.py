"""Wherever samples come from, their tensors begin at 64 bytes when a step, an evaluation or a prediction gets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from shapes import ellipsoid
from torch.utils.data import DataLoader

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh, LabeledMeshes, MeshSamples, Sample, load_shards, make_sample, write_shards
from diffnet.geometry import precompute_all
from diffnet.geometry.store import codec
from diffnet.train.batches import packed
from diffnet.train.checkpoint import build_model
from diffnet.train.evaluate import evaluate, network_outputs
from diffnet.train.inference.predict import predict_probabilities
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.segmentation import TASK

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
OPTIONS = TrainOptions(features="normals", k=7, width=8, blocks=1, dropout=0.0)  # normals are columns of the frames
MESHES = [replace(ellipsoid(seed, 1 + seed % 2), name=f"{seed}") for seed in range(3)]
ITEMS = [LabeledMesh(mesh.name, mesh, (mesh.verts[:, 0] > 0) * 1) for mesh in MESHES]


def computed(folder: Path) -> Sequence[Sample]:
    return [make_sample(item, OPTIONS.preprocessing) for item in ITEMS]


def stored(folder: Path) -> Sequence[Sample]:
    for item in ITEMS:
        make_sample(item, OPTIONS.preprocessing, folder)
    return MeshSamples(ITEMS, OPTIONS.preprocessing, folder)


def stored_by_an_older_version(folder: Path) -> Sequence[Sample]:
    """In files of the safetensors library, which begins arrays anywhere."""
    samples = stored(folder)
    for path in folder.rglob("*.safetensors"):
        content = path.read_bytes()
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        arrays = {name: array for name, array in load_file(path).items() if not name.startswith("__padding")}
        save_file(arrays, path, metadata)
    return samples


def in_shards(folder: Path) -> Sequence[Sample]:
    data = LabeledMeshes(ITEMS, [], ["a", "b"], "vertices")
    write_shards(data, folder / "shards", OPTIONS.preprocessing, folder / "cache", jobs=1)
    return MeshSamples(load_shards(folder / "shards").train, OPTIONS.preprocessing)


def of_worker_processes(folder: Path) -> Sequence[Sample]:
    operators = precompute_all(MESHES, OPTIONS.k, jobs=2, normalize=True)
    plain = [replace(sample, operators=own) for sample, own in zip(computed(folder), operators, strict=True)]
    return [*DataLoader(plain, batch_size=None, num_workers=1)]


def split_from_a_batch(folder: Path) -> Sequence[Sample]:
    (batch,) = packed(computed(folder), [[0, 1, 2]], CPU)
    each = zip(batch.names, batch.operators, *map(batch.operators.unpack, (batch.features, batch.labels)), strict=True)
    return [Sample((name,), features, labels, operators) for name, operators, features, labels in each]


WAYS = [computed, stored, stored_by_an_older_version, in_shards, of_worker_processes, split_from_a_batch]


@pytest.mark.parametrize("small", [codec.SMALL, 0], ids=["read", "mapped"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("error:cache entry")
def test_tensors_begin_at_64_bytes(
    tmp_path: Path,
    way: Callable[[Path], Sequence[Sample]],
    small: int,
    monkeypatch: pytest.MonkeyPatch,
    addresses: dict[str, int],
) -> None:
    """So their outputs have equal bits."""
    monkeypatch.setattr(codec, "SMALL", small)
    model = build_model(OPTIONS, ["a", "b"], "vertices").eval()
    samples = way(tmp_path)
    for sample, other in zip(samples, computed(tmp_path), strict=True):
        found, expected = (network_outputs(model, each, OPTIONS, CPU) for each in (sample, other))
        assert torch.equal(found, expected)
    evaluate(TASK, model, samples, OPTIONS, CPU)
    step = TrainingStep(TASK, model, OPTIONS, CPU)
    rotations = torch.eye(3).repeat(6, 1, 1)
    for n, sample in enumerate(packed(samples, [[0], [1], [0, 1, 2]], CPU)):
        step.add(sample, rotations[n : n + len(sample.operators)].clone())
    step.update(lambda sums: None)
    assert addresses == {"forward": 3 * 2 + 3 + 3, "add": 3}


def test_predictions_of_a_loaded_network(tmp_path: Path, addresses: dict[str, int]) -> None:
    model = build_model(OPTIONS, ["a", "b"], "vertices")
    model.save(tmp_path / "model", features="normals", k=OPTIONS.k, normalize=True)
    network = DiffusionNet.load(tmp_path / "model")
    (_, first), (_, again), (_, stored) = predict_probabilities([MESHES[1]], network, CPU) + [
        predict_probabilities([MESHES[1]], network, CPU, tmp_path)[0] for _ in range(2)
    ]
    assert np.array_equal(first, again)
    assert np.array_equal(first, stored)
    assert addresses == {"forward": 3}
