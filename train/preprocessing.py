"""The data set of a run as samples: standardized targets, decimated meshes, their variants, and the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from diffnet.data import (
    ArrayStatistics,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    Statistics,
    TargetsAt,
    array_statistics,
    fill_cache,
    original_targets,
    standardized_conditions,
    standardized_targets,
    target_statistics,
)
from diffnet.data.arrays import array_states, check_arrays_of_all
from diffnet.data.conversion import length_factors, relative_lengths
from diffnet.data.derived import DerivedMeshes, Make, derived, make_all_variants, make_decimated
from diffnet.data.prepared import PreparedSamples
from diffnet.data.stored import OnDemand, StoredMeshes, joined
from diffnet.geometry import MeshLike
from diffnet.geometry.processes import add_phases, take_phases
from diffnet.train.checkpoint import Checkpoint, CheckpointError
from diffnet.train.console import progress_bar
from diffnet.train.loop import RunData
from diffnet.train.options import TrainOptions
from diffnet.train.ranks import ALONE, Ranks
from diffnet.train.resident import MEMORY, DeviceSamples
from diffnet.train.tasks.task import Task


def run_data(
    task: Task[Any, Any],
    data: LabeledMeshes,
    options: TrainOptions,
    stored: Checkpoint | None,
    out: Path,
    memory: float,
    ranks: Ranks,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
) -> RunData:
    """Standardize targets and conditions, decimate, make variants and preprocess.

    stored: the checkpoint to resume, or None
    """

    def read() -> tuple[Any, ...]:
        targets = conditions = None
        if task.standardized:
            relative = relative_lengths(data.train, options.lengths, options.scale)
            targets = target_statistics(relative, data.label_names, jobs, vectors=options.vectors)
            targets = of_stored_run(stored, "target_statistics", targets, out)
        if data.condition_names:
            conditions = target_statistics(data.train, data.condition_names, jobs, of="conditions")
            conditions = of_stored_run(stored, "condition_statistics", conditions, out)
        fitted, tested = (standard_meshes(part, targets, conditions, options) for part in (data.train, data.test))
        statistics = array_statistics(data.train, options.features, jobs, options.preprocessing.normalize)
        statistics = of_stored_run(stored, "statistics", statistics, out)
        check_arrays_of_all(data.test, options.features, statistics, jobs)  # names what is missing at once
        where: dict[str, Any] = {"cache_dir": cache_dir, "jobs": jobs, "console": console}
        train_items = with_max_faces(fitted, data.labels_at, options, **where)
        test_items = with_max_faces(tested, data.labels_at, options, to_score=True, **where)
        is_single = task.meshes_of_sample == 1  # pairs have copies of their own
        variants = _variants(train_items, data.labels_at, options, **where) if is_single else []
        items = joined([train_items, test_items, variants])
        return statistics, targets, conditions, train_items, test_items, variants, items

    statistics, targets, conditions, train_items, test_items, variants, items = ranks.after_first(read)
    prepared = preprocess(
        items, options.preprocessing, statistics, data.labels_at, cache_dir, jobs, console, device, memory, ranks
    )
    memory /= ranks.place.local_world_size
    # Spectral networks on a GPU read gradients in the eigenbasis, so they differentiate no sparse product.
    reads_matrices = options.diffusion != "spectral" or options.attention_heads > 0 or options.vector_outputs > 0
    prepared.backward = device.type != "cuda" or reads_matrices
    samples = DeviceSamples(prepared, device, task.basis_dtype(options, device), memory)
    trained, tests = len(train_items), len(train_items) + len(test_items)
    origins = variants.origins if isinstance(variants, DerivedMeshes) else np.zeros(0, np.int64)
    bounds = np.searchsorted(origins, np.arange(trained + 1)) + trained
    return RunData(
        task,
        data,
        task.samples(data, "train", samples.take([*range(trained), *range(tests, len(samples))]), options),
        task.samples(data, "test", samples[trained:tests], options),
        statistics,
        targets,
        conditions,
        [[i, *range(a, b)] for i, (a, b) in enumerate(pairwise(bounds.tolist()))] if len(origins) else [],
    )


def standard_meshes(
    items: Sequence[LabeledMesh],
    targets: ArrayStatistics | None,
    conditions: ArrayStatistics | None,
    options: TrainOptions,
) -> Sequence[LabeledMesh]:
    """The meshes with targets and conditions as a network learns them, if these have statistics."""
    if targets is not None:
        items = standardized_targets(relative_lengths(items, options.lengths, options.scale), targets)
    return items if conditions is None else standardized_conditions(items, conditions)


def of_stored_run(stored: Checkpoint | None, name: str, statistics: Any, out: Path) -> Any:
    """The statistics of a stored run, by which its samples were computed. Sums of other versions may round differently.

    Without such a run, they are those of the data. Raises CheckpointError if those of the data are others.
    """
    if stored is None:
        return statistics
    if not _is_close(stored[name], statistics):
        what = "own arrays" if name == "statistics" else name.replace("_statistics", "s")
        raise CheckpointError(f"{out / 'last.pt'}: this run was started on a data set with other {what}")
    return stored[name]


def _is_close(first: Any, second: Any) -> bool:
    """Whether nested dictionaries of lists of numbers are equal except for rounding."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_close(first[key], second[key]) for key in first)
    return len(first) == len(second) and np.allclose(first, second, rtol=1e-9, atol=1e-9 * np.abs(second).max())


def in_units(
    predictions: Sequence[torch.Tensor],
    statistics: ArrayStatistics | None,
    items: Sequence[LabeledMesh],
    options: TrainOptions,
) -> Sequence[torch.Tensor]:
    """Predictions in the units of the targets.

    statistics: of these, or None if they aren't standardized
    items: the meshes, which are read if targets have their unit of length
    """
    if statistics is None:
        return predictions
    lengths, scale, count = options.lengths, options.scale, len(statistics["mean"])

    def converted(i: int) -> torch.Tensor:
        factors = length_factors(items[i].mesh, lengths, scale, count) if lengths else None
        return original_targets(predictions[i], statistics, factors)

    return OnDemand(len(predictions), converted)


def with_max_faces(
    items: Sequence[LabeledMesh], at: TargetsAt, options: TrainOptions, to_score: bool = False, **where: Any
) -> Sequence[LabeledMesh]:
    """The meshes, decimated if some have more than `max_faces` faces. Shows a progress bar then.

    to_score: decimate as `decimated_to_score` does, not as `decimated`
    where: cache_dir, jobs and console
    """
    most = options.max_faces
    faces = items.face_counts if isinstance(items, StoredMeshes) else [len(item.mesh.faces) for item in items]
    if most is None or max(faces, default=0) <= most:
        return items
    how = {"features": options.features, "cache_dir": where["cache_dir"], "to_score": to_score}
    make = partial(make_decimated, at=at, max_faces=most, **how)
    about = ("decimated", at, most, options.features, to_score, array_states(items, options.features))
    return _derived_with_bar("decimation", items, make, *about, **where)


def _variants(
    items: Sequence[LabeledMesh], at: TargetsAt, options: TrainOptions, **where: Any
) -> Sequence[LabeledMesh]:
    """The variants of all training meshes, those of the first mesh first. Shows a progress bar while they are made."""
    wanted = options.mesh_variants
    if not wanted.count:
        return []
    make = partial(make_all_variants, at=at, variants=wanted, features=options.features)
    about = ("variants", at, asdict(wanted), options.features, array_states(items, options.features))
    # A cut takes less time than sending the mesh to a process, decimation takes more.
    return _derived_with_bar("variants", items, make, *about, is_long=wanted.decimate > 0, **where)


def _derived_with_bar(
    title: str, items: Sequence[LabeledMesh], make: Make, *about: Any, console: Console, **where: Any
) -> DerivedMeshes:
    """`derived` with a progress bar."""
    with progress_bar(console) as bar:
        task = bar.add_task(title, total=len(items))
        return derived(items, make, *about, advance=lambda: bar.advance(task), **where)


def preprocess(
    items: Sequence[LabeledMesh],
    options: Preprocessing,
    statistics: Statistics | None,
    at: TargetsAt,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
    device: torch.device,
    memory: float = MEMORY,
    ranks: Ranks = ALONE,
) -> PreparedSamples:
    """The samples in the cache, which is filled first, with a progress bar.

    device: the device that computes operators, see `fill_cache`
    memory: GiB, see `PreparedSamples`

    Raises DataError for meshes that can't be used.
    """
    most = int(memory * 2**30 / ranks.place.local_world_size)
    samples = PreparedSamples(items, options, cache_dir, statistics, at, most)
    return samples.fill(
        lambda sources, ready: fill_cache_with_bar(sources, options, cache_dir, jobs, console, device, ready, ranks),
        ranks.shared,
        ranks.gathered,
    )


def fill_cache_with_bar(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None,
    console: Console,
    device: torch.device,
    ready: Callable[[int], Any] = lambda position: None,
    ranks: Ranks = ALONE,
) -> dict[int, str]:
    """`fill_cache` with a progress bar.

    ranks: those that divide the meshes. Each calls `ready` for its own. All get the reasons and the seconds of all.
    """
    with progress_bar(console, disable=not ranks.is_first) as bar:
        task = bar.add_task("preprocessing", total=len(sources))
        if ranks.is_alone:
            return fill_cache(sources, options, cache_dir, jobs, lambda: bar.advance(task), device, ready)
        earlier, done, positions = take_phases(), ranks.counter(), ranks.handed_out(len(sources))

        def advance(more: int = 1) -> None:
            bar.update(task, completed=done(more))

        failed = fill_cache(sources, options, cache_dir, jobs, advance, device, ready, positions)
        answers = ranks.gathered([list(failed.items()), take_phases()], meanwhile=partial(advance, 0))
        bar.update(task, completed=len(sources))
    for phases in (earlier, *(phases for _, phases in answers)):
        add_phases(phases)
    return dict(sorted((i, reason) for reasons, _ in answers for i, reason in reasons))
