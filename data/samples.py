"""Preprocessed meshes as samples, and their packed batches for a DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Sampler

from diffnet.data.features import Preprocessing, input_features, prepare
from diffnet.data.labeled import LabeledMesh
from diffnet.geometry import Operators, collate


@dataclass(frozen=True)
class Sample:
    """One or, from `collate_samples`, several preprocessed meshes, packed.

    names: of the meshes; features: (V, C); labels: (V,), (F,) or (E,) int64; operators: of the packed batch
    """

    names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    operators: Operators

    def to(self, device: torch.device | str) -> Sample:
        return replace(
            self,
            features=self.features.to(device),
            labels=self.labels.to(device),
            operators=self.operators.to(device),
        )


def make_sample(item: LabeledMesh, options: Preprocessing, cache_dir: str | os.PathLike[str] | None = None) -> Sample:
    """Preprocess one labelled mesh. Raises MeshError for one that can't be used."""
    mesh, operators = prepare(item.mesh, options, cache_dir)
    features = input_features(mesh, operators, options.features)
    return Sample((item.name,), features, torch.from_numpy(item.labels), operators)


def collate_samples(samples: Sequence[Sample]) -> Sample:
    """Pack samples into one; give it to a DataLoader as `collate_fn`."""
    if len(samples) == 1:
        return samples[0]
    return Sample(
        names=sum((s.names for s in samples), ()),
        features=torch.cat([s.features for s in samples]),
        labels=torch.cat([s.labels for s in samples]),
        operators=collate([s.operators for s in samples]),
    )


class MeshBatches(Sampler[list[int]]):
    """Batches of samples by number of meshes or by a vertex budget; give it to a DataLoader as `batch_sampler`.

    lengths: vertices of each sample
    meshes: at most so many meshes in a batch; max_vertices: at most so many vertices, except that a mesh larger than
        the budget makes a batch of its own. Give at least one of the two.
    shuffle, seed: a new order every epoch; the order of epoch e depends on (seed, e) only, see `set_epoch`
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        meshes: int | None = None,
        max_vertices: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if meshes is None and max_vertices is None:
            raise ValueError("give a number of meshes, a vertex budget or both")
        for name, value in (("meshes", meshes), ("max_vertices", max_vertices)):
            if value is not None and value < 1:
                raise ValueError(f"{name} should be at least 1, got {value}")
        self.lengths = list(lengths)
        self.meshes = meshes
        self.max_vertices = max_vertices
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        """The number of batches in this epoch; with a vertex budget it can differ from epoch to epoch."""
        return len(self._batches())

    def _batches(self) -> list[list[int]]:
        order = list(range(len(self.lengths)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
            order = torch.randperm(len(order), generator=generator).tolist()
        batches: list[list[int]] = []
        vertices = 0
        for i in order:
            full = (
                not batches
                or (self.meshes is not None and len(batches[-1]) >= self.meshes)
                or (self.max_vertices is not None and vertices + self.lengths[i] > self.max_vertices)
            )
            if full:
                batches.append([])
                vertices = 0
            batches[-1].append(i)
            vertices += self.lengths[i]
        return batches


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch of one run, so that an epoch can be run again without those before it."""
    return (seed * 1_000_003 + epoch) % 2**63
