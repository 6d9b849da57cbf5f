"""Preprocessed meshes as samples, and packed batches of samples for a DataLoader."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from diffnet.data.derived import Weights
from diffnet.data.feature_names import Statistics
from diffnet.data.features import input_features, prepare
from diffnet.data.labeled import UNLABELED, LabeledMesh, TargetsAt
from diffnet.data.options import Preprocessing
from diffnet.data.places import places_of, row_numbers, rows_at
from diffnet.data.stored import vertex_counts_of
from diffnet.geometry import Mesh, Operators, UnpackAt, collate
from diffnet.geometry.elements.elements import first_triangles, polygon_shares
from diffnet.geometry.mesh.objects import on_host
from diffnet.geometry.pytree import FieldwiseCopy, check_count, check_integer
from diffnet.geometry.store.reading import PinnedEntries, operators_of_tensors
from diffnet.geometry.store.transfer import aligned, pinned


class Interpolation(NamedTuple):
    """Values at elements that are scored, from others: those of a decimated mesh, or the triangles of polygons.

    elements: (M,) int64, the others that each of the N elements takes, one after the other
    weights: (M,) float32, their weights, with sum 1 for each element
    counts: (N,) int64, how many each element takes. One that takes none gets NaN.
    picks: (N,) int64, the label of the sample that belongs to each element, or −1; None if its labels are those of the
        N elements
    """

    elements: Tensor
    weights: Tensor
    counts: Tensor
    picks: Tensor | None = None

    @classmethod
    def of(cls, weights: Weights) -> Interpolation:
        """From the result of `interpolation_weights`."""
        elements, shares = (torch.from_numpy(part) for part in weights)
        counts = torch.full((len(elements),), elements.shape[1])
        return cls(*map(aligned, (elements.reshape(-1), shares.reshape(-1).float(), counts)))

    @classmethod
    def to_score(cls, mesh: Mesh, at: TargetsAt | None, back: Weights | None = None) -> Interpolation | None:
        """What takes outputs to the elements of a mesh file, or None if they are there.

        Polygons get the mean over their triangles, by area.

        back: the result of `interpolation_weights` if a network gets a decimated mesh
        """
        if at is None or "faces" not in places_of(at) or not mesh.has_polygons:
            return None if back is None else cls.of(back)
        numbers = row_numbers(mesh, at)
        elements, weights = (numbers[:, None], np.ones((len(numbers), 1))) if back is None else back
        parts = []
        places = (rows_at(values, len(mesh.verts), at) for values in (elements, weights, numbers))
        for (place, rows), (_, shares), (_, picks) in zip(*places, strict=True):
            counts = np.full(len(rows), rows.shape[1])
            if place == "faces":
                order = np.argsort(mesh.polygons, kind="stable")
                rows, shares = rows[order], (shares * polygon_shares(mesh)[:, None])[order]
                counts = elements.shape[1] * np.bincount(mesh.polygons, minlength=mesh.polygon_count)
                first = first_triangles(mesh)
                picks = np.where(first < 0, first, picks[first])
            parts.append((rows.reshape(-1), shares.reshape(-1).astype(np.float32), counts, picks))
        return cls(*(aligned(torch.from_numpy(np.concatenate(part))) for part in zip(*parts, strict=True)))

    @classmethod
    def among(cls, tensors: Mapping[str, Tensor]) -> Interpolation | None:
        """The inverse of `tensors`, among others. None if it isn't there."""
        return cls(*map(tensors.get, PARTS)) if "weights" in tensors else None  # type: ignore[arg-type]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __call__(self, values: Tensor) -> Tensor:
        """values (…, C) of the other elements → (N, C)"""
        parts = values[self.elements].float() * self.weights[:, None]
        sums = torch.segment_reduce(parts, "sum", lengths=self.counts)
        return torch.where(self.counts[:, None] > 0, sums, torch.nan).to(values.dtype)

    def labels(self, labels: Tensor) -> Tensor:
        """The labels or targets (N, …) of the elements, from those of the sample."""
        if self.picks is None:
            return labels
        missing = labels.new_full((1, *labels.shape[1:]), torch.nan if labels.is_floating_point() else UNLABELED)
        return torch.cat([labels, missing])[self.picks]  # -1 is the last

    def to(self, device: torch.device | str) -> Interpolation:
        return self._replace(**{name: value.to(device) for name, value in self.tensors.items()})


PARTS = ("elements", "weights", "counts", "picks")  # of an interpolation


@dataclass(frozen=True)
class Sample(FieldwiseCopy):
    """One preprocessed mesh, or a packed batch of several, see `collate_samples`.

    names: the names of the meshes
    features: (V, C) float32. On the CPU, tensors here that don't begin at a multiple of 64 bytes are copied.
    labels: (V,), (F,) or (E,) int64, or (B,) with one label per mesh. The label of a single mesh, (), becomes (1,).
        Targets of a regression are (V, C), (F, C), (E, C) or (B, C).
    operators: the operators of the packed batch
    interpolation: takes outputs to the elements that are scored, if these are of a mesh with more faces, see
        `decimated_to_score`, or polygons; or None
    conditions: (B, C) float32, or None if the meshes have none
    """

    names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    operators: Operators
    interpolation: Interpolation | None = None
    conditions: Tensor | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of a network: features, operators and, if there are any, conditions."""
        return self.features, self.operators, *(() if self.conditions is None else (self.conditions,))

    def __post_init__(self) -> None:
        for name, value in (("features", self.features), ("labels", self.labels.reshape(self.labels.shape or (1,)))):
            object.__setattr__(self, name, aligned(value))  # the only way to set a field of a frozen dataclass
        if self.conditions is not None:
            object.__setattr__(self, "conditions", aligned(self.conditions))

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Sample:
        """The sample with all tensors on a device, and features and operators in a dtype. See `Operators.to`."""
        operators = self.operators.to(device, dtype, non_blocking=non_blocking)
        converts = dtype is not None or isinstance(device, torch.dtype)
        real = operators.mass.dtype if converts else self.features.dtype
        return replace(
            self,
            features=self.features.to(operators.device, real, non_blocking=non_blocking),
            labels=self.labels.to(operators.device, non_blocking=non_blocking),
            operators=operators,
            interpolation=None if self.interpolation is None else self.interpolation.to(operators.device),
            conditions=None
            if self.conditions is None
            else self.conditions.to(operators.device, real, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Sample:
        """The sample in pinned memory, from which a GPU copies faster. A DataLoader with `pin_memory=True` calls this.

        Raises RuntimeError if PyTorch finds no GPU.
        """
        features, labels = self.features, self.labels
        if features.requires_grad or labels.requires_grad:
            features, labels = features.pin_memory(), labels.pin_memory()
        else:
            _, (features, labels) = pinned([features, labels])
        more = None if self.conditions is None else self.conditions.pin_memory()
        return replace(self, features=features, labels=labels, operators=self.operators.pin_memory(), conditions=more)


class PinnedSample(NamedTuple):
    """A sample in a buffer of pinned memory.

    counts: of vertices and of faces
    """

    name: str
    entries: PinnedEntries
    counts: tuple[int, int]

    def prepared(self, device: torch.device, basis_dtype: torch.dtype) -> Sample:
        """The sample on a device, as a network uses it. See `Operators.prepared`. The copy may still go on."""
        tensors = self.entries.to(device, non_blocking=True)
        operators = operators_of_tensors(tensors, *self.counts, basis_dtype)
        return sample_from(self.name, tensors, operators)


def make_sample(
    item: LabeledMesh,
    options: Preprocessing,
    cache_dir: str | os.PathLike[str] | None = None,
    statistics: Statistics | None = None,
    labels_at: TargetsAt | None = None,
) -> Sample:
    """Preprocess one labeled mesh: features, labels and operators on the CPU, at normalized positions.

    cache_dir: a folder that keeps operators, see `precompute`. Those of a mesh of `load_shards` come from the shards.
    statistics: of the own arrays among the features, see `input_features`
    labels_at: where the labels are, to score faces of the file and not triangles, see `Sample.interpolation`

    Raises MeshError for a mesh that can't be used, DataError for an own array that can't be used, and TypeError for
    anything but a `LabeledMesh`.

    >>> from diffnet.data import BODIES, load_dataset
    >>> sample = make_sample(load_dataset(BODIES).train[0], Preprocessing(k=8, features="xyz"))
    >>> sample.features.shape[1], bool(sample.features.norm(dim=1).max() < 1.001)
    (3, True)
    """
    if not isinstance(item, LabeledMesh):
        raise TypeError(
            f"item should be a LabeledMesh, got {type(item).__name__}; write LabeledMesh(name, mesh, labels)"
        )
    mesh, operators = prepare(item.mesh, options, cache_dir) if item.prepared is None else item.prepared(options)
    return sample_of(item, mesh, operators, options, statistics, Interpolation.to_score(item.mesh, labels_at))


def sample_of(
    item: LabeledMesh,
    mesh: Mesh,
    operators: Operators,
    options: Preprocessing,
    statistics: Statistics | None,
    interpolation: Interpolation | None,
) -> Sample:
    """A sample from a mesh at normalized positions and its operators, see `make_sample`."""
    features = input_features(mesh, operators, options.features, statistics=statistics, arrays=item.arrays)
    conditions = torch.from_numpy(item.conditions).float()[None] if len(item.conditions) else None
    return Sample((item.name,), features, torch.as_tensor(item.labels), operators, interpolation, conditions)


def sample_from(name: str, tensors: Mapping[str, Tensor], operators: Operators) -> Sample:
    """The sample of a mesh from the tensors of its entry in the cache."""
    features, labels, conditions = (tensors.get(key) for key in ("features", "labels", "conditions"))
    assert features is not None
    assert labels is not None
    return Sample((name,), features, labels, operators, Interpolation.among(tensors), conditions)


@dataclass(eq=False, repr=False)
class MeshSamples(Dataset[Sample]):
    """The samples of labeled meshes for a DataLoader. Each is made by `make_sample` when it is asked for.

    items: the meshes, such as `train` of `index_dataset`, which reads them when they are needed. Nothing is kept
        between items.
    vertex_counts: (N,) int64, for `MeshBatches`
    options, cache_dir, statistics: see `make_sample`. With operators in the cache, an item takes the time to read them;
        `fill_cache` computes those of many meshes on all cores.

    Worker processes of a DataLoader get a copy of the items. Those of `index_dataset` are small. Raises the errors of
    `make_sample` and of the items.
    """

    items: Sequence[LabeledMesh]
    options: Preprocessing
    cache_dir: str | os.PathLike[str] | None = None
    statistics: Statistics | None = None

    @property
    def vertex_counts(self) -> NDArray[np.int64]:
        return vertex_counts_of(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        return make_sample(self.items[index], self.options, self.cache_dir, self.statistics)


def output_rows(outputs: Tensor | tuple[Tensor, ...], outputs_at: Any, operators: Operators) -> Tensor:
    """The outputs of a network as one tensor (N, C): of each mesh the rows that its targets have, see `load_targets`.

    outputs_at: of the network. The outputs for one place stay.
    """
    if isinstance(outputs, Tensor):
        return outputs
    parts = []
    for place, values in zip(filter(outputs_at.__contains__, get_args(UnpackAt)), outputs, strict=True):
        rows = values.new_full((len(values), len(outputs_at)), torch.nan)
        rows[:, [i for i, at in enumerate(outputs_at) if at == place]] = values
        parts.append([part.reshape(-1, len(outputs_at)) for part in operators.unpack(rows, at=place)])
    return torch.cat([rows for mesh in zip(*parts, strict=True) for rows in mesh])


def collate_samples(samples: Sequence[Sample]) -> Sample:
    """Pack samples into one. Pass this function to a DataLoader as `collate_fn`. The result is for training.

    Raises ValueError if some samples have one label per mesh and others one per vertex, face or edge, and if one
    of several samples has labels of a mesh with more faces.
    """
    if len(samples) == 1:
        return samples[0]
    for sample in samples:
        if sample.interpolation is not None and sample.interpolation.picks is None:
            raise ValueError(f"{sample.names[0]}: a sample with an interpolation can't be packed with others")
    conditions = [s.conditions for s in samples if s.conditions is not None]
    return Sample(
        names=sum((s.names for s in samples), ()),
        features=torch.cat([s.features for s in samples]),
        labels=torch.cat([s.labels for s in samples]),
        operators=collate([s.operators for s in samples]),
        conditions=torch.cat(conditions) if conditions else None,
    )


class MeshBatches(Sampler[list[int]]):
    """Batches of samples, limited by meshes or by vertices. Pass it to a DataLoader as `batch_sampler`.

    lengths: number of vertices of each sample
    meshes: maximum number of meshes in a batch
    max_vertices: maximum number of vertices in a batch. A mesh with more vertices is a batch of its own. At least one
        of the two limits is required.
    shuffle, seed: a new order in every epoch. The order depends only on the seed and the epoch.
    generator: draws the seed, once, instead of `seed`
    num_replicas, rank: the number of processes that train together, and the number of this one, from 0. Without both,
        they are those of the process group of torch.distributed, if there is one when an epoch begins. Each process
        gets its share of every batch; shares have about equal numbers of vertices. The two limits are those of the
        whole batch. A batch has at least one mesh for each process, even with more vertices than `max_vertices`; the
        last one repeats the first meshes of the epoch for that.

    Each iteration is one epoch, from 0. `set_epoch` chooses the next one, for example to resume a run.

    Raises ValueError if both limits are missing or one is below 1, for a negative length, for a rank that is not one of
    the processes, and for fewer meshes in a batch than processes. Raises TypeError for limits, lengths, seeds and ranks
    that are not integers.

    >>> list(MeshBatches([10, 20, 30, 5], max_vertices=35))
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        meshes: int | None = None,
        max_vertices: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if meshes is None and max_vertices is None:
            raise ValueError("MeshBatches needs meshes, max_vertices or both")
        for name, value in (("meshes", meshes), ("max_vertices", max_vertices)):
            if value is not None:
                check_count(name, value, 1)
        self.lengths = [check_count(f"lengths[{i}]", length, 0) for i, length in enumerate(on_host(lengths))]
        self.meshes = meshes
        self.max_vertices = max_vertices
        self.shuffle = shuffle
        self.seed = check_integer("seed", seed)
        if generator is not None:
            self.seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        self._place: tuple[int, int] | None = None
        if num_replicas is not None or rank is not None:
            count = check_count("num_replicas", 1 if num_replicas is None else num_replicas, 1)
            self._place = count, check_count("rank", 0 if rank is None else rank, 0)
            if self._place[1] >= count:
                raise ValueError(f"rank should be below num_replicas, {count}, got {rank}")
        self._check_replicas()
        self.epoch = 0
        self._begun = 0

    @property
    def num_replicas(self) -> int:
        """The number of processes that train together."""
        return self._replicas_and_rank()[0]

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._replicas_and_rank()[1]

    def _replicas_and_rank(self) -> tuple[int, int]:
        if self._place is not None:
            return self._place
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
        return 1, 0

    def _check_replicas(self) -> None:
        lengths, meshes, processes = len(self.lengths), self.meshes, self.num_replicas
        if 1 <= min(lengths, meshes or lengths) < processes:
            limits = f"{lengths} lengths" if meshes is None else f"{lengths} lengths and meshes={meshes}"
            raise ValueError(f"each batch needs a mesh for each of the {processes} processes, got {limits}")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, counted from 0, whose order the next iteration has."""
        self.epoch = self._begun = check_count("epoch", epoch, 0)

    def __iter__(self) -> Iterator[list[int]]:
        self._begun = self.epoch
        self.epoch += 1
        return iter(self._batches(self._begun))

    def __len__(self) -> int:
        """The number of batches in the epoch that was begun or chosen last.

        With `max_vertices` and `shuffle`, it can differ between epochs.
        """
        return len(self._batches(self._begun))

    def _batches(self, epoch: int) -> list[list[int]]:
        self._check_replicas()
        replicas = self.num_replicas
        order = list(range(len(self.lengths)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))
            order = torch.randperm(len(order), generator=generator).tolist()
        most, most_vertices = self.meshes or math.inf, self.max_vertices or math.inf
        batches: list[list[int]] = []
        vertices = 0
        for i in order:
            meshes = len(batches[-1]) if batches else most
            if meshes >= most or (vertices + self.lengths[i] > most_vertices and meshes >= replicas):
                batches.append([])
                vertices = 0
            batches[-1].append(i)
            vertices += self.lengths[i]
        if replicas == 1:
            return batches
        missing = replicas - len(batches[-1])
        batches[-1] += order[: max(missing, 0)]
        return [self._share(batch) for batch in batches]

    def _share(self, batch: list[int]) -> list[int]:
        """The meshes of a batch that this process gets."""
        shares = balanced_shares([self.lengths[i] for i in batch], self.num_replicas)
        return [batch[position] for position in shares[self.rank]]


def balanced_shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide meshes into shares with about equal numbers of vertices. Returns the positions in each share, ascending.

    lengths: number of vertices of each mesh
    count: number of shares. If there are fewer meshes, some shares are empty.

    The largest mesh that is left goes to the share that is smallest so far (Graham 1969). No share is empty if there
    are enough meshes.

    >>> balanced_shares([50, 10, 20, 30], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    totals = [(0, 0, share) for share in range(count)]  # vertices, meshes and number of each share: a heap
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        vertices, meshes, share = totals[0]
        shares[share].append(position)
        heapreplace(totals, (vertices + lengths[position], meshes + 1, share))
    return [sorted(share) for share in shares]


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch. It does not depend on earlier epochs, so a run can be resumed at any epoch."""
    return (seed * 1_000_003 + epoch) % 2**63
