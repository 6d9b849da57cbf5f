"""Measures how many predictions of a network stay the same when the test meshes change."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from diffnet.checkpoints.safetensors_file import is_safetensors
from diffnet.data import UNLABELED, LabeledMesh, fill_cache, load_dataset
from diffnet.geometry import Mesh, MeshError
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder, write_atomically
from diffnet.train.checkpoint import Checkpoint, load_checkpoint, restore_model
from diffnet.train.inference.mesh_changes import CHANGES, LOST
from diffnet.train.inference.predict import predict_labels
from diffnet.train.metrics import percent
from diffnet.train.run import surroundings

Labels: TypeAlias = NDArray[np.int64]

SEED = 0  # of the random changes


def run_robustness(checkpoint: Path, data: str, out: Path, device: torch.device, console: Console) -> None:
    """`diffnet robustness`: measure, print each row, and write results.json into the folder `out`.

    data: the folder of the network's data set. Its labels are converted to the vertices.

    Each change of `CHANGES` is made to the test meshes that have faces. Their labels are predicted as `diffnet predict`
    does it, and carried over to the original vertices. Random changes are the same in every run. A change that leaves a
    mesh that can't be used has a row with an error.

    Raises CheckpointError, DataError or OptionError for a file or folder that can't be used, and OptionError if the
    data set does not fit the network.
    """
    if is_safetensors(checkpoint):
        raise OptionError(
            f"--checkpoint should be a checkpoint of diffnet train, got {checkpoint}, a file of model.save"
        )
    network = load_checkpoint(checkpoint)
    seed = network["options"]["seed"]  # it decides which meshes of some data sets are test meshes
    make_folder(out)
    dataset = load_dataset(data, seed=seed, labels_at="vertices")
    items = [item for item in dataset.test if not item.mesh.is_point_cloud]
    if network["labels_at"] != "vertices":
        raise OptionError(f"the network should label vertices, this one labels {network['labels_at']}")
    if network["label_names"] != dataset.label_names:
        raise OptionError(
            f"the network was trained on another data set: it has {len(network['label_names'])} classes at the "
            f"vertices, and the data set has {len(dataset.label_names)}, or other names"
        )
    if not items:
        raise OptionError("the data set has no test mesh with faces")
    before = _predict([item.mesh for item in items], network, device)
    rows = []
    for name in CHANGES:
        row = _measure(name, items, before, network, device)
        scores = row["error"] or f"{percent(row['kept'])} kept, accuracy {percent(row['accuracy'])}"
        console.print(f"{name}: {scores}")
        rows.append(row)
    results = {
        "accuracy": _mean([_accuracy(labels, item.labels) for labels, item in zip(before, items, strict=True)]),
        "rows": rows,
        "test_meshes": len(items),
        "epochs": len(network["history"]),
        "command": ["diffnet", *sys.argv[1:]],
        **surroundings(device),
        "options": network["options"],
    }
    write_atomically(out / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    console.print(f"wrote {out / 'results.json'}", soft_wrap=True)


def _measure(
    name: str, items: Sequence[LabeledMesh], before: Sequence[Labels], checkpoint: Checkpoint, device: torch.device
) -> dict[str, Any]:
    """One change of all test meshes. The shares are means over the meshes of shares of their vertices.

    kept: share of the vertices whose predicted label is that of the unchanged mesh
    accuracy_before, accuracy: shares of correct predictions for the unchanged and for the changed mesh. Vertices that
        the change removes count in neither.
    error: why the change could not be measured, else None
    """
    row: dict[str, Any] = dict.fromkeys(("change", "kept", "accuracy_before", "accuracy", "error")) | {"change": name}
    try:
        changes = [CHANGES[name](item.mesh, np.random.default_rng([SEED, i])) for i, item in enumerate(items)]
        after = _predict([mesh for mesh, _ in changes], checkpoint, device)
    except MeshError as e:
        return row | {"error": str(e)}
    same, accuracy_before, accuracy = [], [], []
    for item, labels_before, (_, stand_ins), labels_after in zip(items, before, changes, after, strict=True):
        there = stand_ins != LOST
        labels_before, labels_after, truth = labels_before[there], labels_after[stand_ins[there]], item.labels[there]
        same.append(float((labels_after == labels_before).mean()))
        accuracy_before.append(_accuracy(labels_before, truth))
        accuracy.append(_accuracy(labels_after, truth))
    return row | {"kept": _mean(same), "accuracy_before": _mean(accuracy_before), "accuracy": _mean(accuracy)}


def _predict(meshes: Sequence[Mesh], checkpoint: Checkpoint, device: torch.device) -> list[Labels]:
    """The labels of meshes. All cores preprocess them first. Raises MeshError for a mesh that can't be used."""
    with tempfile.TemporaryDirectory() as cache:
        network, options = restore_model(checkpoint)
        failures = fill_cache(meshes, options.preprocessing, cache)
        if failures:
            raise MeshError(f"{len(failures)} of {len(meshes)} meshes can't be used: {next(iter(failures.values()))}")
        return [labels for _, labels in predict_labels(meshes, network, device, cache)]


def _accuracy(labels: Labels, truth: Labels) -> float:
    has_label = truth != UNLABELED
    return float((labels == truth)[has_label].mean()) if has_label.any() else float("nan")


def _mean(shares: Sequence[float]) -> float:
    """The mean over the meshes. A mesh without labeled vertices has an accuracy of NaN, which does not count."""
    return round(float(np.nanmean(shares)), 6)
