"""Batches reach a GPU while it works on those before."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from operator_checks import tiny_operators

from diffnet.data import Sample, samples
from diffnet.train import batches
from diffnet.train.batches import AHEAD, packed

GPU = torch.device("cuda")


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
