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
from diffnet.data import UNLABELED, LabeledMesh, fill_cache, load_dataset, without_classes
from diffnet.data.feature_names import array_names
from diffnet.data.folders.files import listing
from diffnet.geometry import Mesh, MeshError
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder, write_atomically
from diffnet.train.checkpoint import Checkpoint, load_checkpoint, restore_model
from diffnet.train.inference.mesh_changes import CHANGES, LOST
from diffnet.train.inference.predict import predict_labels
from diffnet.train.metrics import mean_score, number_or_none, percent
from diffnet.train.run import surroundings
from diffnet.train.run_checks import DIGITS, contents_of

Labels: TypeAlias = NDArray[np.int64]

SEED = 0  # of the random changes


def run_robustness(checkpoint: Path, data: str, out: Path, device: torch.device, console: Console, **how: Any) -> None:
    """`diffnet robustness`: measure, print each row, and write results.json into the folder `out`.

    data: the folder of the network's data set. Its labels are converted to the vertices.
    how: `layout` and `files` of `load_dataset`. Other arguments are the options of the network.

    Each change of `CHANGES` is made to the test meshes that have faces. Their labels are predicted as `diffnet predict`
    does it, and carried over to the original vertices. Random changes are the same in every run. A change that leaves a
    mesh that can't be used has a row with an error.

    Raises CheckpointError, DataError or OptionError for a file or folder that can't be used, and OptionError for a
    network with own arrays or conditions, which changed meshes lack, and if the data set does not fit the network.
    """
    if is_safetensors(checkpoint):
        raise OptionError(
            f"--checkpoint should be a checkpoint of diffnet train, got {checkpoint}, a file of model.save"
        )
    network = load_checkpoint(checkpoint)
    options = network["options"]
    inputs = {"own arrays": array_names(options["features"]), "conditions": options["conditions"]}
    for what, names in inputs.items():
        if names:
            raise OptionError(f"the network takes {what}, which changed meshes don't have")
    make_folder(out)
    how |= {name: options[name] for name in ("labels", "group_by", "seed")}
    dataset = without_classes(load_dataset(data, labels_at="vertices", **how), options["ignore"])
    items = [item for item in dataset.test if not item.mesh.is_point_cloud]
    if network["labels_at"] != "vertices":
        raise OptionError(f"the network should label vertices, this one labels {network['labels_at']}")
    if network["label_names"] != dataset.label_names:
        raise OptionError(
            f"the network was trained on another data set: it has {len(network['label_names'])} classes at the "
            f"vertices, and the data set has {len(dataset.label_names)}, or other names"
        )
    if not any((item.labels != UNLABELED).any() for item in items):
        raise OptionError("the data set has no test mesh with faces and labels")
    hashes = {*network.get("train_meshes", ())}
    seen = [item.name for item, (mesh, *_) in zip(items, contents_of(items), strict=True) if mesh[:DIGITS] in hashes]
    if seen:
        raise OptionError(
            f"the network was trained on {listing(seen)}, which would be tested. Give --files and --layout as in its "
            "training. Runs of --folds can't be measured"
        )
    before = _predict([item.mesh for item in items], network, device)
    rows = []
    for name in CHANGES:
        row = _measure(name, items, before, network, device)
        scores = row["error"] or f"{percent(row['kept'])} kept, accuracy {percent(row['accuracy'])}"
        console.print(f"{name}: {scores}")
        rows.append(row)
    results = {
        "accuracy": _mean([_accuracy(a[a >= 0], item.labels[a >= 0]) for a, item in zip(before, items, strict=True)]),
        "rows": rows,
        "test_meshes": len(items),
        "epochs": len(network["history"]),
        "command": ["diffnet", *sys.argv[1:]],
        **surroundings(device),
        "options": options,
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
        there = (stand_ins != LOST) & (labels_before != UNLABELED)  # vertices of no face have no label
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


def _mean(shares: Sequence[float]) -> float | None:
    """The mean over the meshes. A mesh without labeled vertices has an accuracy of NaN, which does not count."""
    return number_or_none(round(mean_score(np.array(shares)), 6))
