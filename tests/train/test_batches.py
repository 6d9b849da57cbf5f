"""Samples on their way to a step: batches reach a GPU while it works, and ranks get parts. Where tensors begin."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from operator_checks import tiny_operators
from safetensors.numpy import load_file, save_file
from shapes import ellipsoid
from torch.utils.data import DataLoader

from diffnet import DiffusionNet
from diffnet.data import (
    LabeledMesh,
    LabeledMeshes,
    MeshBatches,
    MeshSamples,
    Sample,
    load_shards,
    make_sample,
    write_shards,
)
from diffnet.geometry import precompute_all
from diffnet.geometry.store import codec
from diffnet.train import batches
from diffnet.train.batches import AHEAD, largest_part, own_parts, packed
from diffnet.train.checkpoint import build_model
from diffnet.train.evaluate import evaluate, network_outputs
from diffnet.train.inference.predict import predict_probabilities
from diffnet.train.options import TrainOptions
from diffnet.train.place import Place
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.segmentation import TASK

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def numbered(count: int) -> list[Sample]:
    """Samples whose features and labels are their numbers."""
    operators = tiny_operators()[0]
    v = operators.num_vertices
    return [Sample((f"{i}",), torch.full((v, 3), float(i)), torch.full((v,), i), operators) for i in range(count)]


def test_a_batch_waits_for_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events are replaced by a list of what happens."""
    happened: list[str] = []

    def recorded() -> SimpleNamespace:
        step = sum(each.startswith("step") for each in happened) - 1
        return SimpleNamespace(synchronize=lambda: happened.append(f"wait {step}"))

    monkeypatch.setattr(Sample, "to", lambda self, device, **_: happened.append(f"move {self.names[0]}") or self)
    copies = SimpleNamespace(wait_stream=lambda stream: happened.append("wait for all"))
    steps = SimpleNamespace(record_event=recorded, wait_stream=lambda stream: happened.append("wait for copies"))
    monkeypatch.setattr(batches, "copy_stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    for sample in packed(numbered(6), [[i] for i in range(6)], GPU):
        happened.append(f"step {sample.names[0]}")
    assert [each for each in happened if each.startswith("step")] == [f"step {i}" for i in range(6)]
    for i in range(6):
        moved_at = happened.index(f"move {i}")
        assert happened[moved_at + 1 : moved_at + 3] == ["wait for copies", f"step {i}"]
        if i > AHEAD:
            assert happened[moved_at - 1] == f"wait {i - 1 - AHEAD}"
    assert happened[0] == "wait for all"
    assert len(happened) == 1 + 6 * 3 + 5 - AHEAD


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
def test_a_busy_gpu_reads_the_right_batch(pin: bool) -> None:
    each = [s.pin_memory() if pin else s for s in numbered(30)]
    sums = []
    for sample in packed(each, [[i] for i in range(30)], GPU):
        torch.cuda._sleep(10_000_000)  # the batch is read milliseconds later
        sums.append(torch.stack([sample.features.mean(), sample.labels.double().mean(), sample.operators.mass.sum()]))
    mass = each[0].operators.mass.sum().item()
    for i, found in enumerate(torch.stack(sums).tolist()):
        assert found == pytest.approx([i, i, mass])


@pytest.mark.gpu
def test_moving_a_batch_does_not_wait_for_the_step_before() -> None:
    moved = packed(numbered(5), [[i] for i in range(5)], GPU)
    for _ in range(4):
        next(moved)
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # half a second
    done.record()
    next(moved)
    assert not done.query()


@pytest.mark.gpu
def test_a_data_loader_pins_samples() -> None:
    loader = torch.utils.data.DataLoader(numbered(2), batch_size=None, pin_memory=True)  # type: ignore[arg-type]
    for i, sample in enumerate(loader):
        assert all(x.is_pinned() for x in (sample.features, sample.labels, sample.operators.evecs))
        assert (sample.to("cuda").features == i).all()


def epoch_of(rng: np.random.Generator, count: int, limit: int) -> tuple[list[int], list[list[int]]]:
    lengths = [int(n) for n in rng.integers(2_000, 60_000, count)]
    return lengths, list(MeshBatches(lengths, meshes=limit, shuffle=True, seed=int(rng.integers(1000))))


@pytest.mark.parametrize(("world", "passes"), [(1, 3), (2, 1), (3, 2), (4, 1)])
def test_each_mesh_is_in_one_part(world: int, passes: int) -> None:
    lengths, divided = epoch_of(np.random.default_rng(0), 21, 5)  # the last batch has one mesh
    order = [i for batch in divided for i in batch]
    every = [own_parts(divided, lengths, Place(rank, world), passes) for rank in range(world)]
    _, most = largest_part(lengths, TrainOptions(batch_meshes=5), world * passes)
    first = 0
    for n, batch in enumerate(divided):
        parts = [part for own in every for part in own[n]]
        assert sorted(i for part in parts for i in part) == list(range(first, first + len(batch)))
        assert all(parts)
        assert all(len(own[n]) <= passes for own in every)
        assert max(sum(lengths[order[i]] for i in part) for part in parts) <= most
        first += len(batch)


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_wait_little_for_another(world: int) -> None:
    """8 meshes a rank, a new order in each epoch. A step takes at most as long as its vertices say."""
    rng, lost = np.random.default_rng(0), []
    lengths = [int(n) for n in rng.integers(2_000, 60_000, 8 * world * 20)]
    epochs = MeshBatches(lengths, meshes=8 * world, shuffle=True)
    for _ in range(10):
        every = list(epochs)
        order = [i for batch in every for i in batch]
        shares = [own_parts(every, lengths, Place(rank, world), 1) for rank in range(world)]
        for step in zip(*shares, strict=True):
            loads = [sum(lengths[order[i]] for i in part) for (part,) in step]
            lost.append(1 - np.mean(loads) / max(loads))
    assert np.mean(lost) < 0.01  # 0.5 % with 2 ranks and 0.8 % with 8


# ---- addresses: tensors begin at 64 bytes when a step, an evaluation or a prediction gets them ----


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
