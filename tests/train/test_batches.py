"""Batches reach a GPU while it works on those before, and are divided over ranks and passes."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from operator_checks import tiny_operators
from rooms import ROOT

from diffnet.data import MeshBatches, Sample, samples
from diffnet.train import batches
from diffnet.train.batches import AHEAD, largest_part, own_parts, packed
from diffnet.train.options import TrainOptions
from diffnet.train.place import Place

GPU = torch.device("cuda")
RESULTS = ROOT / "benchmarks" / "results" / "loops-h200" / "steps" / "train-step.csv"


def numbered(count: int) -> list[Sample]:
    """Samples whose features and labels are their numbers."""
    operators = tiny_operators()[0]
    v = operators.num_vertices
    return [Sample((f"{i}",), torch.full((v, 3), float(i)), torch.full((v,), i), operators) for i in range(count)]


def test_a_batch_waits_for_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events are replaced by a list of what happens."""
    happened: list[str] = []

    def moved(sample: Sample, device: torch.device, *, non_blocking: bool) -> Sample:
        happened.append(f"move {sample.names[0]}")
        return sample

    def recorded() -> SimpleNamespace:
        step = sum(each.startswith("step") for each in happened) - 1
        return SimpleNamespace(synchronize=lambda: happened.append(f"wait {step}"))

    monkeypatch.setattr(samples.Sample, "to", moved)
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
    """8 meshes a rank, a new order in each epoch. A step of a rank takes what was measured for as many vertices."""
    with RESULTS.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["dtype"], r["peer"]) == ("bf16", "diffnet-command")]
    points = sorted((int(row["vertices"]), float(row["median_ms"])) for row in rows)
    (v0, t0), (v1, t1) = points[-2:]
    vertices, times = zip(*points, (1_000_000, t1 + (t1 - t0) * (1_000_000 - v1) / (v1 - v0)), strict=True)
    rng, lost = np.random.default_rng(0), []
    lengths = [int(n) for n in rng.integers(2_000, 60_000, 8 * world * 20)]
    epochs = MeshBatches(lengths, meshes=8 * world, shuffle=True)
    for _ in range(10):
        every = list(epochs)
        order = [i for batch in every for i in batch]
        shares = [own_parts(every, lengths, Place(rank, world), 1) for rank in range(world)]
        for step in zip(*shares, strict=True):
            loads = [sum(lengths[order[i]] for i in part) for (part,) in step]
            taken = np.interp(loads, vertices, times)
            lost.append(1 - taken.mean() / taken.max())
    assert np.mean(lost) < 0.01  # 0.5 % with 2 ranks and 0.7 % with 8
