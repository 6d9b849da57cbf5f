"""Preprocessed meshes in the cache: features and labels beside the operators, read when a sample is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.data.arrays import array_states
from diffnet.data.derived import DerivedMeshes
from diffnet.data.feature_names import Statistics
from diffnet.data.features import load_meanwhile, prepare
from diffnet.data.labeled import DataError, LabeledMesh, TargetsAt
from diffnet.data.options import Preprocessing
from diffnet.data.samples import PARTS, Interpolation, PinnedSample, Sample, make_sample, sample_from, sample_of
from diffnet.data.stored import OnDemand, SampleFacts, StoredMeshes, recalled, remember, sources_of
from diffnet.geometry import MeshLike
from diffnet.geometry.errors import some_reasons
from diffnet.geometry.preprocessing.worker import entry_name
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, has_entry, read_entry, write_entry
from diffnet.geometry.store.reading import operators_at, read_again

Fill = Callable[[Sequence[MeshLike], Callable[[int], Any]], dict[int, str]]


class PreparedSamples(OnDemand[Sample]):
    """The samples of meshes. Each is read from the cache, which `fill` fills, when it is asked for, on the CPU.

    items, options, cache_dir, statistics: see `make_sample`. Samples of decimated meshes to score, see
        `decimated_to_score`, get their interpolation.
    labels_at: where the labels are
    memory: bytes of samples that are kept if the cache can't be written
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
        super().__init__(len(items), self._sample)
        self._items, self._options, self._cache_dir, self._statistics = items, options, os.fspath(cache_dir), statistics
        self._labels_at, self._memory = labels_at, memory
        self._decisive = options.decisive
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
        return np.array([sample.vertices for sample in self.facts], np.int64)

    def _sample(self, i: int) -> Sample:
        if not self.facts[i].entry:
            return make_sample(self._items[i], self._options, self._cache_dir, self._statistics, self._labels_at)
        return self._kept.get(i) or self._read(i) or self.make(i)[1]

    def pinned(self, i: int) -> Sample | PinnedSample:
        """A sample in pinned memory, from which `.to` copies it to a GPU."""
        name, entry, operators, vertices, faces, *_ = self.facts[i]
        # With transposes, and with a basis in half precision, operators hold more than the arrays of their entry.
        if entry and not self.backward and self._options.basis == "float32" and i not in self._partial:
            entries = read_again([self._path(entry, "sample"), self._path(operators, "operators")])
            if entries is not None and entries.are_direct:
                self.whole.add(i)
                return PinnedSample(name, entries, (vertices, faces))
            if entries is not None:
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
        matrices = operators_at(
            self._path(operators, "operators"), faces, vertices, self._decisive, verts, self.backward
        )
        if matrices is None:
            return None
        names = {"features", "labels", "conditions", *PARTS} & arrays.keys()
        return sample_from(name, {key: torch.from_numpy(arrays[key]) for key in names}, matrices)

    def make(self, i: int) -> tuple[SampleFacts, Sample]:
        """Compute a sample from its mesh and write its entries. What can't be written is kept in memory."""
        item = self._items[i]
        mesh, operators = prepare(item.mesh, self._options, self._cache_dir)
        interpolation = _interpolation(self._items, i, item, self._labels_at)
        sample = sample_of(item, mesh, operators, self._options, self._statistics, interpolation)
        name, verts = entry_name(mesh, self._decisive)
        arrays: Arrays = {"features": sample.features.numpy(), "labels": sample.labels.numpy()}
        arrays["faces"] = mesh.faces.astype(np.int32)
        if sample.conditions is not None:
            arrays["conditions"] = sample.conditions.numpy()
        if interpolation is not None:
            arrays |= {key: tensor.numpy() for key, tensor in interpolation.tensors.items()}
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
            held = sum(other.operators.evecs.nbytes for other in self._kept.values())
            if held + sample.operators.evecs.nbytes > self._memory:
                raise DataError(
                    f"{path}: the cache can't be written, and without it the data set takes more than the "
                    f"{self._memory / 2**30:.3g} GiB of --memory. Free its disk, or choose another folder with --cache"
                )
            self._kept[i] = sample

    def fill(
        self,
        fill: Fill,
        shared: Callable[[Callable[[], Any]], Any] = lambda make: make(),
        gathered: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> PreparedSamples:
        """Compute the samples that the cache doesn't have, and write them into it. Returns these samples.

        fill: calls `fill_cache` with these meshes and its argument `ready`
        shared, gathered: of the `Ranks` that fill the cache together. `ready` is then called for some of the meshes,
            and `fill` returns the same in all ranks.

        Raises DataError for meshes that can't be used. The others are computed first. Shards hold operators, so their
        samples are made when they are asked for.
        """
        items = self._items
        states = array_states(items, self._options.features)
        about = ("samples 3", asdict(self._options), dict(self._statistics or {}), self._labels_at, states)
        facts = shared(lambda: recalled(items, *about))
        if facts is None:
            facts = items.operator_facts() if isinstance(items, StoredMeshes) else [None] * len(items)
            if missing := [i for i, row in enumerate(facts) if row is None]:
                failed, rows = load_meanwhile(
                    lambda n: self.make(missing[n])[0], lambda ready: fill(sources_of(items, missing), ready)
                )
                if failed:
                    lines = [_with_name(items[missing[n]].name, reason) for n, reason in failed.items()]
                    message = f"{len(failed)} of {len(items)} meshes can't be used: {some_reasons(lines)}"
                    raise DataError(message).about({line.partition(": ")[0]: line for line in lines})
                every = gathered([not self._kept, [(missing[n], row.result()) for n, row in rows.items()]])
                for i, row in (each for _, part in every for each in part):
                    facts[i] = row
                if all(is_complete for is_complete, _ in every):
                    remember(facts, items, *about)
        self.facts = [SampleFacts(*row) for row in facts]
        return self


def _with_name(name: str, reason: str) -> str:
    """A reason that begins with what it is about: most name the file of the mesh."""
    return reason if name in reason.partition(": ")[0] else f"{name}: {reason}"


def _interpolation(items: Sequence[LabeledMesh], number: int, item: LabeledMesh, at: TargetsAt) -> Interpolation | None:
    """What takes outputs of a mesh to the elements that are scored. item: the one with this number"""
    place, row = items.place(number) if isinstance(items, StoredMeshes) else (items, number)
    if isinstance(place, DerivedMeshes) and (back := place.back(row)) is not None:
        return Interpolation.to_score(place.origin(row).mesh, at, back)
    return Interpolation.to_score(item.mesh, at)
