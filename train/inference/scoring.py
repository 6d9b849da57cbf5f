"""Scores of a trained network on labeled meshes, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import UNLABELED, DataError, LabeledMesh, LabeledMeshes
from diffnet.geometry.errors import OptionError
from diffnet.train.evaluate import evaluate
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.run import preprocess, surroundings, write_results
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

    Labels and classes of the network are matched by name. Returns the content of results.json.

    Raises OptionError if `out` is a file or holds results; DataError if the labels are at other elements than those of
    the network, for a label whose name it lacks, and for a mesh that can't be used; and MetadataError, see
    `network_input`.
    """
    expected = network_input(network)
    check_empty(out)
    if data.labels_at != expected.labels_at:
        raise DataError(f"the labels are at {data.labels_at}, and the network predicts labels at {expected.labels_at}")
    items = _renumbered(data, expected.label_names)
    if expected.normalize:
        samples = preprocess(items, expected.options, cache_dir, jobs, console)
    else:
        samples = [
            replace(input_sample(item.mesh, expected, cache_dir), labels=torch.as_tensor(item.labels)) for item in items
        ]
    predictions: list[Tensor] = []
    evaluate(network.to(device), samples, expected.options, device, predictions)
    task = task_named(expected.options.task)
    scored = Scored(items, predictions, expected.label_names, expected.labels_at)
    results = {
        "task": expected.options.task,
        **task.results(scored),
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


def _renumbered(data: LabeledMeshes, names: list[str]) -> list[LabeledMesh]:
    """The test part with the numbers that the network has for these names of labels."""
    used = {int(label) for item in data.test for label in np.unique(item.labels) if label >= 0}
    unknown = [data.label_names[label] for label in sorted(used) if data.label_names[label] not in names]
    if unknown:
        raise DataError(
            f"the network has no class {', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''}; its classes are "
            f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}. Labels are matched by name"
        )
    known = {name: number for number, name in enumerate(names)}
    # The last entry is that of the label -1.
    numbers = np.array([*(known.get(name, UNLABELED) for name in data.label_names), UNLABELED], np.int64)
    return [replace(item, labels=np.asarray(numbers[item.labels])) for item in data.test]
