"""Scores of a trained network on pairs of meshes, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import MeshPairs, own_arrays
from diffnet.train.correspondence.scoring import as_labeled, score_pairs
from diffnet.train.correspondence.targets import pair_samples
from diffnet.train.evaluate import evaluate
from diffnet.train.inference.network_input import MetadataError, network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.inference.scoring import check_empty
from diffnet.train.run import preprocess, surroundings, write_results
from diffnet.train.tasks.correspondence import CORRESPONDENCE
from diffnet.train.tasks.task import Scored


def run_pair_evaluation(
    data: MeshPairs,
    network: DiffusionNet,
    out: Path,
    *,
    zoomout: bool = False,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Match the test pairs of a set with a network, and write the report to the folder `out`.

    network: one of `load_matching_network`, whose metadata say what it takes as input
    zoomout: see `point_map_of`

    Returns the content of results.json. Raises OptionError if `out` is a file or holds results, DataError for a mesh or
    an own array that can't be used, and MetadataError for a network of another task.
    """
    expected = network_input(network)
    options = expected.options
    if options.task != "correspondence":
        raise MetadataError(f"the network is for {options.task}; pairs need one for correspondence")
    check_empty(out)
    labeled = as_labeled(data, network.out_channels)
    for item in labeled.test:
        own_arrays(item.mesh, options.features, expected.statistics, item.arrays)  # names what is missing
    if expected.normalize:
        samples = preprocess(labeled.test, options, cache_dir, jobs, console, expected.statistics)
    else:
        samples = [input_sample(item.mesh, expected, cache_dir, item.arrays) for item in labeled.test]
    pairs = pair_samples(data, "test", samples, options.map_k)
    predictions: list[Tensor] = []
    evaluate(network.to(device), pairs, options, device, predictions)
    found = score_pairs(data, predictions, pairs, zoomout, device, cache_dir=cache_dir, jobs=jobs, console=console)
    scored = Scored(labeled.test, predictions, expected.label_names, expected.labels_at, found)
    results = {
        "task": options.task,
        **CORRESPONDENCE.results(scored),
        "test_meshes": len(data.test),
        **surroundings(device),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, results)
    summary = {"Meshes": str(len(data.test)), "Date": results["date"][:10]}
    CORRESPONDENCE.write_report(out, scored, results, summary, None)
    return results
