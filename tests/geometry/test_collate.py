"""Samples of tensors, labels and operators as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from operator_checks import tiny_operators
from torch import Tensor
from torch.utils.data import DataLoader

from diffnet.data import MeshBatches
from diffnet.geometry import Operators, collate, transfer

pytestmark = pytest.mark.usefixtures("one_thread")


class Pair(NamedTuple):
    features: Tensor
    operators: Operators


def features(operators: Operators, channels: int = 3) -> Tensor:
    return torch.arange(float(operators.num_vertices * channels)).reshape(-1, channels)


def test_tuples_of_tensors_and_labels() -> None:
    each = tiny_operators()
    x, o, labels, share = collate([(features(m), m, i, i / 2) for i, m in enumerate(each)])
    assert torch.equal(x, torch.cat([features(m) for m in each]))
    assert isinstance(o, Operators)
    assert o.lengths == (42, 4, 8, 30)
    assert torch.equal(labels, torch.arange(4))
    assert torch.equal(share, torch.tensor([0, 0.5, 1, 1.5]))
    *_, single = collate([(features(each[0]), each[0], 7)])
    assert torch.equal(single, torch.tensor([7]))


def test_rows_decide_how_tensors_are_packed() -> None:
    each = tiny_operators()[:3]
    samples = [
        {
            "operators": m,
            "labels": torch.full((m.num_vertices,), i),
            "of faces": torch.full((len(m.faces), 2), i),
            "of edges": np.full(len(m.edges), i),
            "of mesh": torch.full((2,), i),
            "matrix": np.full((3, 3), float(i)),
            "number": torch.tensor(i),
            "numpy": np.float64(i),
            "flag": i > 0,
        }
        for i, m in enumerate(each)
    ]
    for count in (1, 3):
        batch = collate(samples[:count])
        assert list(batch) == list(samples[0])
        for name, lengths in (
            ("labels", batch["operators"].lengths),
            ("of faces", batch["operators"].face_lengths),
            ("of edges", batch["operators"].edge_lengths),
        ):
            parts = batch[name].split(lengths)
            assert all((part == i).all() for i, part in enumerate(parts)), name
        assert batch["of mesh"].tolist() == [[i, i] for i in range(count)]
        assert batch["matrix"].shape == (count, 3, 3)
        assert batch["matrix"].dtype == torch.float64
        for name, dtype in (("number", torch.int64), ("numpy", torch.float64), ("flag", torch.bool)):
            assert batch[name].shape == (count,), name
            assert batch[name].dtype == dtype, name


def test_nested_samples() -> None:
    """Pairs of meshes, as siamese networks take them. A label may stand outside of the part with its operators."""
    a, b, c, d = tiny_operators()
    samples = [
        {"pair": (Pair(features(x), x), [features(y, 2), y]), "labels": torch.zeros(y.num_vertices), "name": name}
        for x, y, name in ((a, b, "one"), (c, d, "two"))
    ]
    batch = collate(samples)
    first, second = batch["pair"]
    assert isinstance(first, Pair)
    assert isinstance(second, list)
    assert first.operators.lengths == (42, 8)
    assert first.features.shape == (50, 3)
    assert second[0].shape == (34, 2)
    assert batch["labels"].shape == (34,)
    assert batch["name"] == ["one", "two"]
    assert collate([(a, None, Path("x")), (b, None, Path("y"))])[1:] == ([None, None], [Path("x"), Path("y")])


def test_tensors_of_packed_operators() -> None:
    """A sample may hold a packed batch."""
    each = tiny_operators()
    x, o = collate([(features(collate(each[:2])), collate(each[:2])), (features(each[2]), each[2])])
    assert x.shape == (54, 3)
    assert o.lengths == (42, 4, 8)
    (again,) = collate([(collate(each),)])
    assert again.lengths == collate(collate(each)).lengths == (42, 4, 8, 30)  # type: ignore[arg-type]


def test_samples_that_cannot_be_packed() -> None:
    a, b, *_ = tiny_operators()

    def refused(samples: list[Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            collate(samples)

    refused([], ValueError, "empty")
    refused([(a, torch.zeros(5)), (b, torch.zeros(7))], ValueError, r"sample\[1\] .* \[\(5,\), \(7,\)\].*\[\[42, 4\]\]")
    refused([(a, torch.zeros(42)), (b, torch.tensor(0.0))], ValueError, r"shapes are \[\(42,\), \(\)\]")
    refused([(torch.zeros(42),), (torch.zeros(4),)], ValueError, "numbers of vertices are ")
    refused([(a, 1), (b, "1")], TypeError, r"sample\[1\] should have one type in all samples, got int, str")
    refused([a, (b,)], TypeError, "sample should have one type in all samples, got Operators, tuple")
    refused([(a, 1), (b,)], TypeError, "sample should have the same length, 2")
    refused([{"x": a}, {"y": b}], TypeError, r"same keys, \['x'\]")
    refused([{"x": a}, (b,)], TypeError, "one type in all samples, got dict, tuple")
    refused([(a, object()), (b, object())], TypeError, r"sample\[1\] is of type object")
    refused([{"x": (a, 1)}, {"x": (b, None)}], TypeError, r"sample\['x'\]\[1\] should have one type")
    refused([(a, 1), (a.to("meta"), 1)], ValueError, "different device")


class Clouds(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        operators = tiny_operators()[index]
        return {"x": features(operators), "mesh": (operators, index)}


def test_loaders_with_workers() -> None:
    data = Clouds()
    batches = MeshBatches([o.num_vertices for o in tiny_operators()], max_vertices=50)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=1)
    found = list(loader)
    assert [batch["mesh"][1].tolist() for batch in found] == [[0, 1], [2, 3]]
    for batch, part in zip(found, (tiny_operators()[:2], tiny_operators()[2:]), strict=True):
        operators, expected = batch["mesh"][0], collate(part)
        assert torch.equal(batch["x"], torch.cat([features(o) for o in part]))
        assert operators.lengths == expected.lengths
        assert torch.equal(operators.evecs, expected.evecs)
        x = torch.randn(operators.num_vertices, 2)
        torch.testing.assert_close(operators.gradient @ x, expected.gradient @ x)


def test_pinned_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader with pin_memory=True does with a batch. Copies stand for pinned memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    monkeypatch.setattr(transfer, "empty_pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x, device=None: x.clone())
    batch = collate([Clouds()[i] for i in range(4)])
    pinned = pin_memory(batch)
    assert pinned["x"].data_ptr() != batch["x"].data_ptr()
    operators, labels = pinned["mesh"]
    assert operators.evecs.data_ptr() != batch["mesh"][0].evecs.data_ptr()
    assert torch.equal(operators.evecs, batch["mesh"][0].evecs)
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_loaders_with_pinned_memory() -> None:
    loader = DataLoader(Clouds(), batch_size=2, collate_fn=collate, num_workers=1, pin_memory=True)
    for batch in loader:
        operators, labels = batch["mesh"]
        assert batch["x"].is_pinned()
        assert labels.is_pinned()
        assert operators.evecs.is_pinned()
        there = operators.to("cuda", non_blocking=True)
        assert torch.equal(there.evecs.cpu(), operators.evecs)
    moved = [{"x": s["x"].cuda(), "mesh": (s["mesh"][0].cuda(), s["mesh"][1])} for s in (Clouds()[0], Clouds()[1])]
    assert collate(moved)["mesh"][1].is_cuda
