"""Scores of a trained network on labeled meshes, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import (
    DataError,
    LabeledMeshes,
    decimated_to_score,
    original_targets,
    own_arrays,
    standardized_targets,
    with_labels_at,
    without_classes,
)
from diffnet.geometry.errors import OptionError
from diffnet.train.evaluate import evaluate
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.run import few_faces, preprocess, scored_on, surroundings, write_results
from diffnet.train.tasks.registry import task_named
from diffnet.train.tasks.task import Scored


def run_evaluation(
    data: LabeledMeshes,
    network: DiffusionNet,
    out: Path,
    *,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Score a network on the test part of a data set, and write the report of its task to the folder `out`.

    network: one of `DiffusionNet.load`, whose metadata say what it takes as input; see `network_input`

    Labels and classes of the network are matched by name. Classes that were ignored in training don't count. Labels at
    other elements than the network's are converted, see `labels_at`. Returns the content of results.json.

    Raises OptionError if `out` is a file or holds results; DataError for labels that can't be converted, for a label
    whose name the network lacks, and for a mesh or an own array that can't be used; and MetadataError, see
    `network_input`.
    """
    expected = network_input(network)
    check_empty(out)
    data, task, targets = replace(data, train=[]), task_named(expected.options.task), expected.target_statistics
    at, options = expected.labels_at, expected.options
    if at == "meshes" or data.labels_at == "meshes" or task.name == "regression":
        if data.labels_at != at:
            raise DataError(f"the labels are at {data.labels_at}, and the network predicts those at {at}")
    else:
        data = with_labels_at(data, at)
    items = task.matched(without_classes(data, expected.options.ignore), expected.label_names).test
    standardized = items if targets is None else standardized_targets(items, targets)
    for item in items:
        own_arrays(item.mesh, expected.options.features, expected.statistics, item.arrays)  # names what is missing
    if expected.normalize:
        taken = few_faces(decimated_to_score, standardized, at, options, cache_dir, jobs, console)
        small = [item for item, _ in taken]
        samples = preprocess(small, options, cache_dir, jobs, console, expected.statistics)
        samples = [scored_on(sample, back) for sample, (_, back) in zip(samples, taken, strict=True)]
    else:
        samples = [
            replace(input_sample(item.mesh, expected, cache_dir, item.arrays), labels=torch.as_tensor(item.labels))
            for item in standardized
        ]
    predictions: list[Tensor] = []
    evaluate(network.to(device), samples, expected.options, device, predictions)
    if targets is not None:
        predictions = [original_targets(each, targets) for each in predictions]
    scored = Scored(items, predictions, expected.label_names, expected.labels_at)
    results = {
        "task": expected.options.task,
        **task.results(scored),
        "labels_at": expected.labels_at,
        "test_meshes": len(items),
        **surroundings(device),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, results)
    summary = {"Meshes": str(len(items)), "Date": results["date"][:10]}
    task.write_report(out, scored, results, summary, None)
    return results


def check_empty(out: Path) -> None:
    """Raises OptionError if `out` is a file or holds results."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out}: a report needs a folder, and this is a file")
    present = [name for name in ("results.json", "last.pt") if (out / name).exists()]
    if present:
        raise OptionError(f"{out}: this folder already holds results ({present[0]}); choose another one")
