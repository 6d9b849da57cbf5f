"""Scores of a trained network on labeled meshes or on pairs, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import (
    LabeledMesh,
    LabeledMeshes,
    MeshPairs,
    Sample,
    decimated_to_score,
    make_sample,
    original_targets,
    own_arrays,
    standardized_targets,
)
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder
from diffnet.train.evaluate import evaluate
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.mesh_hash import mesh_hash
from diffnet.train.run import (
    check_filled,
    decimated_items,
    fill_cache_with_bar,
    scored_on,
    surroundings,
    write_results,
)
from diffnet.train.tasks.registry import task_named


def run_evaluation(
    data: LabeledMeshes | MeshPairs,
    network: DiffusionNet,
    out: Path,
    *,
    zoomout: bool = False,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Score a network on the test part of a data set, and write the report of its task to the folder `out`.

    data: labeled meshes, or meshes in pairs for a correspondence
    network: one of `DiffusionNet.load` or `load_matching_network`, whose metadata say what it takes as input; see
        `network_input`
    zoomout: of a correspondence, see `point_map_of`

    Labels and classes of the network are matched by name. Classes that were ignored in training don't count. Labels at
    other elements than the network's are converted, see `labels_at`. Returns the content of results.json. Its entry
    `scored_training_meshes` counts the scored meshes that the network was trained on. It is null if this isn't known.

    Raises OptionError if `out` is a file or holds results, and for `zoomout` in another task; DataError for labels that
    can't be converted, for a label whose name the network lacks, and for a mesh or an own array that can't be used; and
    MetadataError, see `network_input`, and for pairs with a network of another task.
    """
    expected = network_input(network)
    check_empty(out)
    task, targets = task_named(expected.options.task), expected.target_statistics
    options = replace(expected.options, zoomout=zoomout)
    tested = task.test_set(data, expected)
    items: list[LabeledMesh] = tested.test
    standardized = items if targets is None else standardized_targets(items, targets)
    for item in items:
        own_arrays(item.mesh, options.features, expected.statistics, item.arrays)  # names what is missing
    if expected.normalize:
        taken = decimated_items(decimated_to_score, standardized, expected.labels_at, options, cache_dir, jobs, console)
        chosen, statistics = options.preprocessing, expected.statistics
        check_filled(
            [item for item, _ in taken],
            fill_cache_with_bar([item.mesh for item, _ in taken], chosen, cache_dir, jobs, console, device),
        )

        def load(i: int) -> Sample:
            item, back = taken[i]
            return scored_on(make_sample(item, chosen, cache_dir, statistics), back)
    else:

        def load(i: int) -> Sample:
            item = standardized[i]
            sample = input_sample(item.mesh, expected, cache_dir, item.arrays)
            return replace(sample, labels=torch.as_tensor(item.labels))

    meshes = _LoadedSamples(len(items), load)
    samples = task.samples(tested, "test", meshes, options)
    predictions: list[Tensor] = []
    evaluate(task, network.to(device), samples, options, device, predictions)
    if targets is not None:
        predictions = [original_targets(each, targets) for each in predictions]
    where: dict[str, Any] = {"device": device, "cache_dir": cache_dir, "jobs": jobs, "console": console}
    scored = task.scored(tested, predictions, samples, options=options, **where)
    known = expected.train_meshes
    seen = None if known is None else sum(mesh_hash(item.mesh) in known for item in items)
    results = {
        "task": task.name,
        **task.results(scored),
        **task.place(expected.labels_at),
        "test_meshes": len(items),
        "scored_training_meshes": seen,
        **surroundings(device),
    }
    make_folder(out)
    write_results(out, results)
    if seen is None:
        console.print("the file of the network doesn't say which meshes it was trained on", soft_wrap=True)
    else:
        console.print(f"scored meshes in the training part: {seen} of {len(items)}")
    count = "not known" if seen is None else str(seen)
    summary = {"Meshes": str(len(items)), "In the training part": count, "Date": results["date"][:10]}
    task.write_report(out, scored, results, summary, None)
    return results


class _LoadedSamples(Sequence[Sample]):
    """Samples that are loaded whenever they are asked for, so that they need no memory in between."""

    def __init__(self, count: int, load: Callable[[int], Sample]) -> None:
        self._count, self._load = count, load

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self._load(i)


def check_empty(out: Path) -> None:
    """Raises OptionError if `out` can't be a folder or holds results."""
    check_folder_path(out)
    present = [name for name in ("results.json", "last.pt") if (out / name).exists()]
    if present:
        raise OptionError(f"{out}: this folder already holds results ({present[0]}); choose another one")
