"""Correspondence: functional maps between pairs of meshes, from features at their vertices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from diffnet.data import LabeledMeshes, MeshPairs, PairSample, Sample, figure_pairs, load_pairs
from diffnet.data.counts import counted
from diffnet.data.folders.files import some
from diffnet.geometry import Operators, area_under_curve, mean_error
from diffnet.geometry.errors import OptionError
from diffnet.train.correspondence.maps import pair_maps, unsupervised_loss
from diffnet.train.correspondence.scoring import as_labeled, score_pairs
from diffnet.train.correspondence.targets import pair_samples
from diffnet.train.correspondence.turns import facing_alike
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.options.correspondence import OPTIONS
from diffnet.train.tasks.task import DataOptions, PairFunctions, Scored, ScoredPairs, Task, scores_a_test

_MATCH = "the network computes features for correspondence; `diffnet match` uses them"


def _check(pairs: MeshPairs, options: TrainOptions) -> None:
    if options.method == "supervised" and not pairs.is_supervised:
        folders = dict.fromkeys(shape.folder for shape in pairs.train + pairs.test if shape.folder)
        place = f"{some(folders)}: " if folders else ""
        raise OptionError(f"{place}the data have no correspondences; use --method unsupervised")
    cloud = next((shape.mesh for shape in pairs.train + pairs.test if shape.mesh.is_point_cloud), None)
    if cloud is not None and options.normalize == "area":
        raise OptionError(f"{cloud.name}: a point cloud has no area to normalize; use --normalize radius")


def _samples(pairs: MeshPairs, part: str, samples: Sequence[Sample], options: TrainOptions) -> list[PairSample]:
    with_targets = part == "test" or options.method == "supervised"
    return pair_samples(pairs, part, samples, options.map_k, with_targets=with_targets)


def _maps(features: Tensor, operators: Operators, options: TrainOptions) -> Tensor:
    return pair_maps(features, operators, options.method, options.map_k, options.feature_scale)


def map_loss(maps: Tensor, targets: Tensor, options: TrainOptions) -> Tensor:
    """The loss () of functional maps (P, M, K, K).

    "supervised" is the squared Frobenius distance to the true maps (P, K, K), averaged over pairs. For "unsupervised"
    see `unsupervised_loss`.
    """
    if options.method == "unsupervised":
        return unsupervised_loss(maps)
    return (maps[:, 0] - targets).square().sum((1, 2)).mean()


def _predict(maps: Tensor) -> Tensor:
    """The map (P, K, K) to match with."""
    return maps[:, 0]


def _new_tally(channels: int, device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.float64, device=device)


def _tally(maps: Tensor, targets: Tensor, channels: int) -> Tensor:
    """The squared errors and the squared entries of the true maps that are known."""
    known = ~targets.isnan()
    truth = targets.double().nan_to_num()
    errors = torch.where(known, maps.double() - truth, 0)
    return torch.stack([errors.square().sum(), truth.square().sum()])


def _score(tally: Tensor) -> float:
    """R² of functional maps, 1 − ‖C − C_true‖² / ‖C_true‖². NaN if no true map is known."""
    errors, truth = tally.tolist()
    return 1 - errors / truth if truth > 0 else float("nan")


def _load_test(path: Path, known: DataOptions, cache_dir: Path) -> MeshPairs:
    if str(path) == OPTIONS.generated:
        made = figure_pairs(train=2, seed=known.seed, cache_dir=cache_dir)  # the smallest number
        return replace(made, train=[], train_pairs=[])
    return load_pairs(path, known.pairs, base=known.base, cache_dir=cache_dir, needs_train=False)


def _results(scored: Scored) -> dict[str, Any]:
    """Errors are geodesic distances divided by √area. They are null if the true correspondences are not known."""
    pairs = _pairs(scored)
    names = [(pairs.data.test[i].name, pairs.data.test[j].name) for i, j in pairs.data.test_pairs]
    counts = {"train_pairs": len(pairs.data.train_pairs), "test_pairs": len(names)}
    if not pairs.errors:
        nothing = dict.fromkeys(("mean_error", "mean_error_x100", "auc", "floor", "unflipped_mean_error"))
        return {**nothing, "flipped_pairs": None, **counts, "pairs": []}
    every = np.concatenate([own.errors for own in pairs.errors])
    has_mirror = pairs.data.mirror is not None
    mean = mean_error(every)
    return {
        "mean_error": mean,
        "mean_error_x100": 100 * mean,
        "auc": area_under_curve(every),
        "floor": float(np.mean([own.floor for own in pairs.errors])),
        "unflipped_mean_error": mean_error(np.concatenate([own.unflipped for own in pairs.errors])),
        "flipped_pairs": sum(own.flipped for own in pairs.errors) if has_mirror else None,
        **counts,
        "pairs": [
            {"first": first, "second": second, "mean_error": mean_error(own.errors), "flipped": own.flipped}
            for (first, second), own in zip(names, pairs.errors, strict=True)
        ],
    }


def _pairs(scored: Scored) -> ScoredPairs:
    assert scored.pairs is not None
    return scored.pairs


def _summary(results: dict[str, Any]) -> tuple[Table, str]:
    table = Table("first", "second", "error ×100", "flipped")
    table.columns[2].justify = "right"
    worst = sorted(results["pairs"], key=lambda row: -row["mean_error"])
    for row in worst[:10]:
        table.add_row(row["first"], row["second"], f"{100 * row['mean_error']:.2f}", "yes" if row["flipped"] else "")
    if len(worst) > 10:
        table.add_row(f"… {len(worst) - 10} better pairs in results.json", "", "", "")
    of = "test pair" if scores_a_test(results) else "pair"
    pairs = counted(results["test_pairs"], of, f"{of}s")
    if results["mean_error"] is None:
        return table, f"{pairs}, whose true correspondences are not known"
    flipped = results["flipped_pairs"]
    flips = "" if flipped is None else f", {counted(flipped, 'pair', 'pairs')} with left and right exchanged"
    return table, (
        f"mean geodesic error ×100 of {pairs}: {results['mean_error_x100']:.3f} (nearest "
        f"vertices {100 * results['floor']:.3f}), area under the curve {results['auc']:.4f}{flips}"
    )


def _write_report(
    out: Path, scored: Scored, results: dict[str, Any], summary: Mapping[str, str], curves: bytes | None
) -> None:
    from diffnet.train.report.pairs import write_pairs_report  # Matplotlib takes half a second to import

    write_pairs_report(out, _pairs(scored), results, summary, curves)


def _matched(data: LabeledMeshes, names: list[str]) -> LabeledMeshes:
    raise OptionError(_MATCH)


def _predicts_no_files(*arguments: Any) -> NoReturn:
    raise OptionError(_MATCH)


TASK = Task(
    name="correspondence",
    targets_at=("vertices",),  # they have the features from which functional maps are computed
    outputs=("feature", "features"),
    loss=map_loss,
    predict=_predict,
    new_tally=_new_tally,
    tally=_tally,
    score=_score,
    score_name="r2",  # of functional maps
    load_test=_load_test,
    matched=_matched,
    results=_results,
    summary=_summary,
    write_report=_write_report,
    report_files=("errors.png", "errors.csv"),
    formats=_predicts_no_files,
    write_file=_predicts_no_files,
    write_views=_predicts_no_files,
    pairs=PairFunctions(
        check=_check, as_labeled=as_labeled, samples=_samples, inputs=facing_alike, maps=_maps, score=score_pairs
    ),
)
