"""Scores of a trained network on labeled meshes or on pairs, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import (
    DataError,
    LabeledMesh,
    LabeledMeshes,
    MeshPairs,
    PairSample,
    Sample,
    decimated_to_score,
    original_targets,
    own_arrays,
    standardized_targets,
    with_labels_at,
    without_classes,
)
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder
from diffnet.train.evaluate import evaluate
from diffnet.train.inference.network_input import MetadataError, NetworkInput, network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.mesh_hash import mesh_hash
from diffnet.train.run import few_faces, preprocess, scored_on, surroundings, write_results
from diffnet.train.tasks.registry import task_named
from diffnet.train.tasks.task import Scored


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
    if not isinstance(data, MeshPairs):
        items = _matched(data, expected)
    elif task.pairs is not None:
        items = task.pairs.as_labeled(data, network.out_channels).test
    else:
        raise MetadataError(f"the network is for {task.name}; pairs need one for correspondence")
    standardized = items if targets is None else standardized_targets(items, targets)
    for item in items:
        own_arrays(item.mesh, options.features, expected.statistics, item.arrays)  # names what is missing
    if expected.normalize:
        taken = few_faces(decimated_to_score, standardized, expected.labels_at, options, cache_dir, jobs, console)
        small = [item for item, _ in taken]
        meshes = preprocess(small, options, cache_dir, jobs, console, expected.statistics)
        meshes = [scored_on(sample, back) for sample, (_, back) in zip(meshes, taken, strict=True)]
    else:
        meshes = [
            replace(input_sample(item.mesh, expected, cache_dir, item.arrays), labels=torch.as_tensor(item.labels))
            for item in standardized
        ]
    samples: Sequence[Sample | PairSample] = meshes
    if isinstance(data, MeshPairs) and task.pairs is not None:
        samples = task.pairs.samples(data, "test", meshes, options)
    predictions: list[Tensor] = []
    evaluate(network.to(device), samples, options, device, predictions)
    if targets is not None:
        predictions = [original_targets(each, targets) for each in predictions]
    scored_pairs = None
    if isinstance(data, MeshPairs) and task.pairs is not None:
        scored_pairs = task.pairs.score(
            data, predictions, samples, options, device, cache_dir=cache_dir, jobs=jobs, console=console
        )
    known = expected.train_meshes
    seen = None if known is None else sum(mesh_hash(item.mesh) in known for item in items)
    scored = Scored(items, predictions, expected.label_names, expected.labels_at, scored_pairs)
    results = {
        "task": task.name,
        **task.results(scored),
        **({"labels_at": expected.labels_at} if scored_pairs is None else {}),
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


def _matched(data: LabeledMeshes, expected: NetworkInput) -> list[LabeledMesh]:
    """The test meshes with labels at the elements of a network and with its classes or columns."""
    data, at = replace(data, train=[]), expected.labels_at
    if at == "meshes" or data.labels_at == "meshes" or expected.target_statistics is not None:
        if data.labels_at != at:
            raise DataError(f"the labels are at {data.labels_at}, and the network predicts those at {at}")
    else:
        data = with_labels_at(data, at)
    kept = without_classes(data, expected.options.ignore)
    return task_named(expected.options.task).matched(kept, expected.label_names).test


def check_empty(out: Path) -> None:
    """Raises OptionError if `out` can't be a folder or holds results."""
    check_folder_path(out)
    present = [name for name in ("results.json", "last.pt") if (out / name).exists()]
    if present:
        raise OptionError(f"{out}: this folder already holds results ({present[0]}); choose another one")
