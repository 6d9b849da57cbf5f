"""Preprocessed meshes in the cache: features and labels beside the operators, read when a sample is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.data.arrays import array_states
from diffnet.data.derived import DerivedMeshes
from diffnet.data.feature_names import Statistics
from diffnet.data.features import input_features, load_meanwhile, prepare
from diffnet.data.labeled import DataError, LabeledMesh, TargetsAt
from diffnet.data.on_demand import LazySequence
from diffnet.data.options import Preprocessing
from diffnet.data.samples import PARTS, Interpolation, PinnedSample, Sample, make_sample
from diffnet.data.stored import JoinedMeshes, StoredMeshes, recalled, remember, sources_of
from diffnet.geometry import MeshLike
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing.worker import entry_name
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, has_entry, read_entry, write_entry
from diffnet.geometry.store.reading import operators_at, read_again

Fill = Callable[[Sequence[MeshLike], Callable[[int], Any]], dict[int, str]]


class SampleFacts(NamedTuple):
    """What is known of a sample without reading it.

    name: of the mesh
    entry, operators: the names of its two cache entries, or "" if the item gives its operators
    vertices, faces, edges, entries: V, F, E, and the nonzeros of the gradient. Edges are counted only if they have
        labels, and may be 0 if the item gives its operators.
    """

    name: str
    entry: str
    operators: str
    vertices: int
    faces: int
    edges: int
    entries: int


class PreparedSamples(LazySequence[Sample]):
    """The samples of meshes, see `prepared_samples`. Each is read from the cache when it is asked for, on the CPU.

    facts: of each sample
    vertex_counts: (N,) int64
    whole: the samples whose entries `pinned` has copied as they are

    A sample whose entries are missing or damaged is made again from its mesh. Raises the errors of that mesh, and
    DataError if the cache can't be written and the samples that it should hold exceed `memory`.
    """

    def __init__(
        self,
        items: Sequence[LabeledMesh],
        options: Preprocessing,
        cache_dir: str | os.PathLike[str],
        statistics: Statistics | None,
        labels_at: TargetsAt,
        memory: int,
    ) -> None:
        self._items, self._options, self._cache_dir, self._statistics = items, options, os.fspath(cache_dir), statistics
        self._labels_at, self._memory = labels_at, memory
        self._decisive = Options(options.k, options.laplacian, options.basis, options.join, options.operators)
        self.backward = True  # see `Pattern.prepare`; for the operators of samples that are read
        self._kept: dict[int, Sample] = {}  # those that the cache can't hold
        self.whole: set[int] = set()
        self._partial: set[int] = set()  # those whose entries a GPU can't use as they are
        self._lock = Lock()
        self.facts: list[SampleFacts] = []

    @property
    def k(self) -> int:
        """The number of eigenpairs."""
        return self._options.k

    @property
    def vertex_counts(self) -> NDArray[np.int64]:
        return np.array([own.vertices for own in self.facts], np.int64)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        if not self.facts[i].entry:
            return make_sample(self._items[i], self._options, self._cache_dir, self._statistics, self._labels_at)
        return self._kept.get(i) or self._read(i) or self.make(i)[1]

    def pinned(self, i: int) -> Sample | PinnedSample:
        """A sample in pinned memory, from which `.to` copies it to a GPU."""
        name, entry, operators, vertices, faces, *_ = self.facts[i]
        # With transposes, and with a basis in half precision, operators hold more than the arrays of their entry.
        if entry and not self.backward and self._options.basis == "float32" and i not in self._partial:
            found = read_again([self._path(entry, "sample"), self._path(operators, "operators")])
            if found is not None and found.are_direct:
                self.whole.add(i)
                return PinnedSample(name, found, (vertices, faces))
            if found is not None:
                self._partial.add(i)
        sample: Sample = self[i]
        return sample.pin_memory()

    def _path(self, entry: str, kind: str) -> Path:
        return entry_path(self._cache_dir, entry, kind)

    def _read(self, i: int) -> Sample | None:
        name, entry, operators, vertices, *_ = self.facts[i]
        arrays = read_entry(self._path(entry, "sample"))
        if arrays is None:
            return None
        faces = arrays["faces"].astype(np.int64)
        verts = arrays.get("verts")
        found = operators_at(self._path(operators, "operators"), faces, vertices, self._decisive, verts, self.backward)
        if found is None:
            return None
        names = {"features", "labels", *PARTS} & arrays.keys()
        tensors = {own: torch.from_numpy(arrays[own]) for own in names}
        return Sample((name,), tensors["features"], tensors["labels"], found, Interpolation.among(tensors))

    def make(self, i: int) -> tuple[SampleFacts, Sample]:
        """Compute a sample from its mesh and write its entries. What can't be written is kept in memory."""
        item = self._items[i]
        mesh, operators = prepare(item.mesh, self._options, self._cache_dir)
        features = input_features(
            mesh,
            operators,
            self._options.features,
            statistics=self._statistics,
            arrays=item.arrays,
            align=self._options.align,
        )
        interpolation = _interpolation(self._items, i, item, self._labels_at)
        sample = Sample((item.name,), features, torch.as_tensor(item.labels), operators, interpolation)
        name, verts = entry_name(mesh, self._decisive)
        arrays: Arrays = {"features": features.numpy(), "labels": sample.labels.numpy()}
        arrays["faces"] = mesh.faces.astype(np.int32)
        if interpolation is not None:
            arrays |= {own: tensor.numpy() for own, tensor in interpolation.tensors.items()}
        if self._options.basis != "float32":
            arrays["verts"] = verts
        arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        entry = cache_key(arrays, operators=name)
        path = self._path(entry, "sample")
        if not has_entry(path):
            write_entry(path, arrays)
        if not (has_entry(path) and has_entry(self._path(name, "operators"))):
            self._keep(i, sample, path)
        edges = len(operators.edges) if self._labels_at == "edges" else 0
        sizes = len(mesh.verts), len(mesh.faces), edges, operators.gradient.pattern.nnz
        return SampleFacts(item.name, entry, name, *sizes), sample

    def _keep(self, i: int, sample: Sample, path: Path) -> None:
        with self._lock:
            held = sum(own.operators.evecs.nbytes for own in self._kept.values())
            if held + sample.operators.evecs.nbytes > self._memory:
                raise DataError(
                    f"{path}: the cache can't be written, and without it the data set takes more than the "
                    f"{self._memory / 2**30:.3g} GiB of --memory. Free its disk, or choose another folder with --cache"
                )
            self._kept[i] = sample

    @property
    def is_complete(self) -> bool:
        """Whether the cache holds all samples."""
        return not self._kept


def prepared_samples(
    items: Sequence[LabeledMesh],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    statistics: Statistics | None,
    labels_at: TargetsAt,
    fill: Fill,
    memory: int,
    shared: Callable[[Callable[[], Any]], Any] = lambda make: make(),
    gathered: Callable[[Any], list[Any]] = lambda value: [value],
) -> PreparedSamples:
    """The samples of meshes. In the first call, all of them are computed and written into the cache.

    items, options, cache_dir, statistics: see `make_sample`. Samples of decimated meshes to score, see
        `decimated_to_score`, get their interpolation.
    labels_at: where the labels are
    fill: calls `fill_cache` with these meshes and its argument `ready`
    memory: bytes of samples that are kept if the cache can't be written
    shared, gathered: of the `Ranks` that fill the cache together. `ready` is then called for some of the meshes, and
        `fill` returns the same in all ranks.

    Raises DataError for meshes that can't be used. The others are computed first.

    Shards hold operators, so their samples are made when they are asked for.
    """
    samples = PreparedSamples(items, options, cache_dir, statistics, labels_at, memory)
    states = array_states(items, options.features)
    about = ("samples 2", asdict(options), dict(statistics or {}), labels_at, states)
    known = shared(lambda: recalled(items, *about))
    if known is not None:
        samples.facts = [SampleFacts(*own) for own in known]
        return samples
    given = _given_facts(items)
    missing = [i for i in range(len(items)) if i not in given]
    if not missing:
        samples.facts = [given[i] for i in range(len(items))]
        return samples
    failed, made = load_meanwhile(
        lambda n: samples.make(missing[n])[0], lambda ready: fill(sources_of(items, missing), ready)
    )
    if failed:
        lines = [f"{items[missing[n]].name}: {reason}" for n, reason in failed.items()]
        raise DataError(f"{len(failed)} of {len(items)} meshes can't be used: " + "; ".join(lines))
    every = gathered([samples.is_complete, [(missing[n], facts.result()) for n, facts in made.items()]])
    found = given | {i: SampleFacts(*own) for _, part in every for i, own in part}
    samples.facts = [found[i] for i in range(len(items))]
    if all(is_complete for is_complete, _ in every):
        remember(samples.facts, items, *about)
    return samples


def _given_facts(items: Sequence[LabeledMesh]) -> dict[int, SampleFacts]:
    """The facts of the samples whose items give their operators, by number."""
    given = items.operator_facts() if isinstance(items, StoredMeshes) else []
    return {i: SampleFacts(own.name, "", "", *own[1:]) for i, own in enumerate(given) if own is not None}


def _interpolation(items: Sequence[LabeledMesh], number: int, item: LabeledMesh, at: TargetsAt) -> Interpolation | None:
    """What takes outputs of a mesh to the elements that are scored. item: the one with this number"""
    if isinstance(items, JoinedMeshes):
        return _interpolation(*items.place(number), item, at)
    back = items.back(number) if isinstance(items, DerivedMeshes) else None
    if isinstance(items, DerivedMeshes) and back is not None:
        item = items.origin(number)
    return Interpolation.to_score(item.mesh, at, back)
