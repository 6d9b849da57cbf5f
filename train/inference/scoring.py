"""Scores of a trained network on labeled meshes or on pairs, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from diffnet import DiffusionNet
from diffnet.data import DataError, LabeledMesh, LabeledMeshes, MeshPairs, Sample, paired_meshes
from diffnet.data.arrays import check_arrays_of_all
from diffnet.data.options import Base
from diffnet.data.pairs.files import find_maps, read_maps
from diffnet.data.stored import OnDemand, check_stored_options, names_of
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text, check_folder_path, make_folder
from diffnet.train.correspondence.maps import measured_pairs
from diffnet.train.evaluate import evaluate
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.options.labels import FurtherScore
from diffnet.train.orientation import warn_of_tilted_items
from diffnet.train.preprocessing import in_units, preprocess, standard_meshes, with_max_faces
from diffnet.train.ranks import ALONE, Ranks
from diffnet.train.run import write_scores
from diffnet.train.run_checks import DIGITS, contents_of
from diffnet.train.run_folder import Spool
from diffnet.train.tasks.correspondence import TASK as CORRESPONDENCE
from diffnet.train.tasks.task import task_named
from diffnet.train.tasks.teeth import tooth_numbers


def run_evaluation(
    data: LabeledMeshes | MeshPairs,
    network: DiffusionNet,
    out: Path,
    *,
    score: FurtherScore | None = None,
    zoomout: bool = False,
    save_maps: Path | None = None,
    map_format: str = "txt",
    device: torch.device,
    cache_dir: Path,
    jobs: int | None = None,
    ranks: Ranks = ALONE,
    console: Console,
) -> dict[str, Any]:
    """Score a network on the test part of a data set, and write the report of its task to the folder `out`.

    data: labeled meshes, or meshes in pairs for a correspondence
    network: one of `DiffusionNet.load` or `load_matching_network`, whose metadata say what it takes as input; see
        `network_input`
    score: "teeth" for the scores of `teeth_scores`, and "roc-auc" or "average-precision" for scores of more than two
        classes by their probabilities
    zoomout: of a correspondence, see `point_map_of`
    save_maps, map_format: of a correspondence: a folder that gets the map of each pair, and "txt", "csv" or "npy"
    ranks: those that share the meshes, see `connected`. Rank 0 writes the report, and all get the results.

    Labels and classes of the network are matched by name. Classes that were ignored in training don't count. Labels at
    other elements than the network's are converted, see `labels_at`. Returns the content of results.json. Its entry
    `scored_training_meshes` counts the scored meshes that the network was trained on. It is null if this isn't known.

    Raises OptionError if `out` is a file or holds results, if a map would replace a file, and for `score`, `zoomout` or
    `save_maps` in another task; DataError for labels that can't be converted, for a label whose name the network lacks,
    and for a mesh or an own array that can't be used; and MetadataError, see `network_input`, and for pairs with a
    network of another task.
    """
    where: dict[str, Any] = {"cache_dir": cache_dir, "jobs": jobs, "console": console}
    expected = network_input(network)
    ranks.shared(lambda: check_empty(out))
    task, targets = task_named(expected.options.task), expected.target_statistics
    teeth = tooth_numbers(expected) if score == "teeth" else ()
    options = replace(expected.options, zoomout=zoomout)
    if score is not None and score != "teeth":
        options = replace(options, score=score)
    test_data = task.test_set(data, expected)
    writer = None if save_maps is None else task.map_writer(test_data, save_maps, map_format)
    items: Sequence[LabeledMesh] = test_data.test
    standard_items = standard_meshes(items, targets, expected.condition_statistics, options)
    check_stored_options([items], options.preprocessing)
    meshes: Sequence[Sample]
    at, statistics = expected.labels_at, expected.statistics

    def read() -> Sequence[LabeledMesh]:
        check_arrays_of_all(items, options.features, statistics, jobs)  # names what is missing
        if not expected.normalize:
            return standard_items
        return with_max_faces(standard_items, at, options, to_score=True, **where)

    views = ranks.after_first(read)
    if expected.normalize:
        meshes = preprocess(views, options.preprocessing, statistics, at, cache_dir, jobs, console, device, ranks=ranks)
    else:

        def load(i: int) -> Sample:
            item = standard_items[i]
            conditions = dict(zip(options.condition_names, items[i].conditions.tolist(), strict=True))
            sample = input_sample(item.mesh, expected, cache_dir, item.arrays, conditions, device)
            return replace(sample, labels=torch.as_tensor(item.labels))

        meshes = OnDemand(len(items), load)
    samples = task.samples(test_data, "test", meshes, options)
    make_folder(out)
    spool = Spool(out)
    evaluate(task, network.to(device), samples, options, device, spool, ranks)

    def report() -> dict[str, Any]:
        warn_of_tilted_items(items, options, jobs)
        predictions = in_units(spool, targets, items, options)
        scored = task.scored(test_data, predictions, samples, options=options, device=device, **where)
        scored = replace(scored, teeth=teeth) if teeth else scored
        if writer is not None:
            writer(scored)
        overlap, in_training = None, "not known"
        if (hashes := expected.train_meshes) is None:
            console.print("the file of the network doesn't say which meshes it was trained on", soft_wrap=True)
        else:
            overlap = sum(content[:DIGITS] in hashes for content, *_ in contents_of(items, jobs))
            in_training = str(overlap)
            console.print(f"scored meshes in the training part: {overlap} of {len(items)}")
        facts = _about(test_data) | {"scored_training_meshes": overlap}
        facts |= {"labels_at": at} if task.meshes_of_sample == 1 else {}
        summary = {"Meshes": str(len(items)), "In the training part": in_training}
        return write_scores(task, scored, out, facts, summary, device)

    return ranks.shared(report)


def score_maps(data: MeshPairs, maps: Path, out: Path, *, base: Base = "auto", **where: Any) -> dict[str, Any]:
    """Score maps of any program on the test pairs of a set, and write the report to the folder `out`.

    maps: the folder of the maps, see `find_maps`. A negative vertex is none, and doesn't count.
    base: the number of the first vertex in their files, see `read_indices`
    where: cache_dir, jobs and console, see `measured_pairs`

    Returns the content of results.json. Raises OptionError if `out` is a file or holds results, and DataError for maps
    that are missing or don't fit, and for a set without true correspondences.
    """
    check_empty(out)
    if not data.is_supervised:
        raise DataError("the set has no true correspondences by which maps could be scored")
    files = find_maps(maps, [(first.mesh.name, second.mesh.name) for first, second in data.test_shapes])
    points = read_maps(files, data.test_shapes, base, needs_all=False)
    scored = measured_pairs(data, points, **where)
    make_folder(out)
    facts = {**_about(paired_meshes(data, 0)), "maps": as_text(str(maps))}
    summary = {"Meshes": str(len(data.test)), "Maps": as_text(str(maps))}
    return write_scores(CORRESPONDENCE, scored, out, facts, summary, torch.device("cpu"))


def _about(data: LabeledMeshes) -> dict[str, Any]:
    """The entries of results.json about the test part of a set."""
    names, left_out = list(map(as_text, names_of(data.test))), list(map(as_text, data.left_out))
    return {"test_meshes": len(names), "divided": data.source, "left_out": left_out, "meshes": {"test": names}}


def check_empty(out: Path) -> None:
    """Raises OptionError if `out` can't be a folder or holds results."""
    check_folder_path(out)
    names = [name for name in ("results.json", "last.pt") if (out / name).exists()]
    if names:
        raise OptionError(f"{out}: this folder already holds results ({names[0]}); choose another one")
