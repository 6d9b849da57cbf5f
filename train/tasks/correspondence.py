"""Correspondence: functional maps between pairs of meshes, from features at their vertices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from diffnet.data import (
    LabeledMeshes,
    MeshPairs,
    PairedMeshes,
    PairSample,
    PairShape,
    Sample,
    load_pairs,
    paired_meshes,
)
from diffnet.data.folders.files import listing
from diffnet.data.labeled import counted
from diffnet.data.pairs.files import map_names, write_map
from diffnet.data.pairs.partial import with_partial_copies
from diffnet.data.pairs.shapes import Pair
from diffnet.geometry import Operators, area_under_curve, mean_error
from diffnet.geometry.elements.elements import face_areas
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path
from diffnet.train.correspondence.maps import ScoredPairs, pair_maps, score_pairs, unsupervised_loss
from diffnet.train.correspondence.partial import OVERLAP, overlap_loss, overlap_outputs, overlap_tally
from diffnet.train.correspondence.targets import pair_samples
from diffnet.train.metrics import mean_score, number_or_none, percent, scores_a_test
from diffnet.train.options import TrainOptions
from diffnet.train.options.correspondence import Method
from diffnet.train.options.task_options import SetOptions
from diffnet.train.tasks.task import NetworkInput, Part, ReportParts, Task

CHANNELS: dict[Method, int] = {"supervised": 128, "unsupervised": 256}  # features that a network computes, by default
# In all epochs together, by default. More unsupervised pairs lower the losses and raise the errors of held-out bodies.
TRAINED_PAIRS: dict[Method, int] = {"supervised": 10_000, "unsupervised": 1_500}
PARTIAL_PAIRS = 25_000  # the same for partial shapes
ADAPTED_PAIRS = 180  # of an unsupervised run that starts from a network. 90 are as good, 720 are too many


class Correspondence(Task[PairedMeshes, ScoredPairs]):
    """Maps between the meshes of a pair, from features that the network computes at their vertices.

    `inputs` and `from_network` get the operators of `collate_pairs`. The outputs of `from_network` have a row for each
    pair, and predictions are functional maps (1, K, K).
    """

    name = "correspondence"
    report_files = ("errors.png", "errors.csv")
    targets_at = ("vertices",)
    meshes_of_sample = 2
    no_classes = "the network computes features for correspondence and no classes; call match_meshes"

    def prepared(self, data: LabeledMeshes, options: TrainOptions) -> tuple[PairedMeshes, TrainOptions]:
        if not isinstance(data, PairedMeshes):
            raise OptionError(f"{self.name} needs pairs of meshes")
        pairs = data.pairs
        if options.partial:
            of_one = options.method == "unsupervised"
            if of_one and not options.mesh_variants.count:
                raise OptionError("without correspondences, partial shapes need parts of one mesh; use --cut 0.7")
            copies = with_partial_copies(pairs, options.mesh_variants, options.seed, of_one=of_one)
            data = paired_meshes(copies, len(data.label_names), partial=True)
        if options.method == "supervised" and not pairs.is_supervised:
            folders = dict.fromkeys(shape.folder for shape in pairs.train + pairs.test if shape.folder)
            place = f"{listing(folders)}: " if folders else ""
            raise OptionError(f"{place}the data have no correspondences; use --method unsupervised")
        cloud = next((shape.mesh for shape in pairs.train + pairs.test if shape.mesh.is_point_cloud), None)
        if cloud is not None and options.normalize.endswith("area"):
            raise OptionError(f"{cloud.name}: a point cloud has no area to normalize; use --normalize radius")
        return data, options

    def described(self, data: PairedMeshes, jobs: int | None) -> list[tuple[str, str]]:
        pairs, note = data.pairs, "" if data.pairs.is_supervised else "; their correspondences are not known"
        return [("pairs", f"{len(pairs.train_pairs)} to train on, {len(pairs.test_pairs)} to test on{note}")]

    def samples(
        self, data: PairedMeshes, part: Part, meshes: Sequence[Sample], options: TrainOptions
    ) -> Sequence[PairSample]:
        with_targets = part == "test" or options.method == "supervised"
        map_k = None if options.partial else options.map_k
        return pair_samples(data.pairs, part, meshes, map_k, with_targets=with_targets)

    def from_network(self, outputs: Tensor, operators: Operators, options: TrainOptions) -> Tensor:
        if options.partial:
            return overlap_outputs(outputs, operators)
        return pair_maps(outputs, operators, options.method, options.map_k, options.feature_scale, options.regularizer)

    def loss(self, maps: Tensor, targets: Tensor, options: TrainOptions) -> Tensor:
        """The loss () of functional maps (P, M, K, K).

        "supervised" is the squared Frobenius distance to the true maps (P, K, K), averaged over pairs. For
        "unsupervised" see `unsupervised_loss`. For partial shapes see `overlap_loss`.
        """
        if options.partial:
            return overlap_loss(maps, targets)
        if options.method == "unsupervised":
            return unsupervised_loss(maps, options.weight_of)
        return (maps[:, 0] - targets).square().sum((1, 2)).mean()

    def loss_weight(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        """The number of pairs."""
        if options.partial:
            return lambda targets: (targets[:, 2] == 0).sum() / 2
        return lambda targets: torch.full((), len(targets), device=targets.device)

    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> PairedMeshes:
        folders = data[0] if len(data) == 1 else list(data)
        where = how.named("base", "registered", "seed", "group_by", "needs_train", "fold", "without")
        pairs = load_pairs(folders, how.pairs, cache_dir=how.cache, partial_shapes=options.partial, **where)
        channels = how.channels or CHANNELS["supervised" if options.partial else options.method]
        return paired_meshes(pairs, channels, partial=options.partial)

    def adapted(self, data: PairedMeshes, options: TrainOptions, choices: Set[str]) -> TrainOptions:
        pairs = data.pairs
        if options.partial and "units" not in choices and options.normalize == "none":
            areas = [face_areas(shape.mesh).sum() for shape in pairs.train]
            options = replace(options, units=float(f"{np.sqrt(max(areas)):.4g}"))
        if "epochs" in choices:
            return options
        count = len(pairs.train_pairs) * max(1, options.mesh_variants.count)
        return replace(options, epochs=max(1, round(_trained_pairs(options) / count)))

    def predict(self, maps: Tensor) -> Tensor:
        """The map (P, K, K) to match with."""
        return maps[:, 0]

    def to_score(self, outputs: Tensor, options: TrainOptions) -> Tensor:
        return outputs if options.partial else self.predict(outputs)

    def new_tally(self, channels: int, device: torch.device, options: TrainOptions) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=device)

    def tally(self, maps: Tensor, targets: Tensor, channels: int, options: TrainOptions) -> Tensor:
        """The squared errors and the squared entries of the true maps that are known, or see `overlap_tally`."""
        if options.partial:
            return overlap_tally(maps, targets)
        is_known = ~targets.isnan()
        truth = targets.double().nan_to_num()
        errors = torch.where(is_known, maps.double() - truth, 0)
        return torch.stack([errors.square().sum(), truth.square().sum()])

    def score(self, tally: Tensor, options: TrainOptions) -> float:
        """R² of functional maps, 1 − ‖C − C_true‖² / ‖C_true‖², or the IoU of the overlap, of all vertices together.

        NaN if no truth is known.
        """
        if options.partial:
            return float(tally[0] / tally[1])
        errors, truth = tally.tolist()
        return 1 - errors / truth if truth > 0 else float("nan")

    def score_name(self, options: TrainOptions) -> str:
        return "overlap_iou" if options.partial else "r2"

    def results(self, scored: ScoredPairs) -> dict[str, Any]:
        """Errors are geodesic distances divided by √area. They are null if the true correspondences are not known.

        `unmatched` counts true correspondences of vertices to which a map gives none. They don't count in errors.
        """
        names = [(first.name, second.name) for first, second in scored.data.test_shapes]
        counts: dict[str, Any] = {"train_pairs": len(scored.data.train_pairs), "test_pairs": len(names)}
        if not scored.errors:
            nothing = dict.fromkeys(("mean_error", "mean_error_x100", "auc", "unflipped_mean_error"))
            return {**nothing, "unmatched": None, "flipped_pairs": None, **counts, "pairs": []}
        errors = np.concatenate([pair.errors for pair in scored.errors])
        for name in OVERLAP if scored.overlaps else ():
            counts[name] = number_or_none(mean_score(np.array([row[name] for row in scored.overlaps], np.float64)))
        overlaps = scored.overlaps or [{} for _ in names]
        has_mirror = any(scored.data.mirrored_truth(*shapes) is not None for shapes in scored.data.test_shapes)
        means = [number_or_none(mean_score(pair.errors)) for pair in scored.errors]  # None without overlap
        mean = mean_error(errors)
        return {
            "mean_error": mean,
            "mean_error_x100": 100 * mean,
            "auc": area_under_curve(errors),
            "unflipped_mean_error": mean_error(np.concatenate([pair.unflipped for pair in scored.errors])),
            "unmatched": int(np.isnan(errors).sum()),
            "flipped_pairs": sum(pair.flipped for pair in scored.errors) if has_mirror else None,
            **counts,
            "pairs": [
                {"first": first, "second": second, "mean_error": error, "flipped": pair.flipped, **overlap}
                for (first, second), error, pair, overlap in zip(names, means, scored.errors, overlaps, strict=True)
            ],
        }

    def per_mesh(self, scored: ScoredPairs, results: dict[str, Any]) -> list[list[Any]]:
        """The error of each pair, if the true correspondences are known."""
        columns = ["first", "second", "mean_error", "flipped", *(OVERLAP if scored.overlaps else ())]
        return [columns, *([row[name] for name in columns] for row in results["pairs"])]

    def summary(self, results: dict[str, Any]) -> tuple[Table, str]:
        has_overlap = OVERLAP[0] in results
        table = Table("first", "second", "error ×100", "IoU of the overlap" if has_overlap else "flipped")
        table.columns[2].justify = "right"
        rows = [row for row in results["pairs"] if row["mean_error"] is not None]  # others have no overlap
        worst = sorted(rows, key=lambda row: -row["mean_error"])
        for row in worst[:10]:
            last = percent(row[OVERLAP[0]]) if has_overlap else "yes" if row["flipped"] else ""
            table.add_row(row["first"], row["second"], f"{100 * row['mean_error']:.2f}", last)
        if len(worst) > 10:
            table.add_row(f"… {len(worst) - 10} better pairs in results.json", "", "", "")
        of = "test pair" if scores_a_test(results) else "pair"
        pairs = counted(results["test_pairs"], of, f"{of}s")
        if results["mean_error"] is None:
            return table, f"{pairs}, whose true correspondences are not known"
        flipped = results["flipped_pairs"]
        flips = "" if flipped is None else f", {counted(flipped, 'pair', 'pairs')} with left and right exchanged"
        if has_overlap:
            iou, accuracy = (percent(results[name]) for name in OVERLAP)
            flips += f", IoU of the overlap {iou}, balanced accuracy {accuracy}"
        count = results["unmatched"]
        unmatched = f", without {counted(count, 'vertex', 'vertices')} that the maps leave out" if count else ""
        return table, (
            f"mean geodesic error ×100 of {pairs}: {results['mean_error_x100']:.3f}, area under "
            f"the curve {results['auc']:.4f}{flips}{unmatched}"
        )

    def write_report(self, scored: ScoredPairs, results: dict[str, Any], parts: ReportParts) -> None:
        from diffnet.train.report.pairs import write_pairs_report  # Matplotlib takes half a second to import

        write_pairs_report(parts.out, scored, results, parts.summary, parts.curves)

    def map_writer(self, data: LabeledMeshes, folder: Path, form: str) -> Callable[[ScoredPairs], None]:
        assert isinstance(data, PairedMeshes)
        check_folder_path(folder)
        meshes = [(first.mesh.name, second.mesh.name) for first, second in data.pairs.test_shapes]
        files = [folder / f"{name}.{form}" for name in map_names(meshes)]
        if there := [file for file in files if file.exists()]:
            raise OptionError(f"{there[0]}: this file would be overwritten; choose another folder for the maps")

        def write(scored: ScoredPairs) -> None:
            for file, vertices, shapes in zip(files, scored.maps, scored.data.test_shapes, strict=True):
                write_map(file, vertices, [shape.mesh for shape in shapes])

        return write

    def test_set(self, data: LabeledMeshes | MeshPairs, network: NetworkInput) -> PairedMeshes:
        if isinstance(data, MeshPairs):
            return paired_meshes(data, len(network.label_names), partial=network.options.partial)
        if not isinstance(data, PairedMeshes):
            raise OptionError("the network computes features for correspondence; `diffnet match` uses them")
        return data

    def size(self, data: PairedMeshes) -> str:
        return counted(len(data.pairs.test_pairs), "pair", "pairs")

    def pairs(self, data: PairedMeshes) -> bytes:
        digest, pairs = hashlib.sha256(), data.pairs
        truths = _truths(pairs.train, pairs.train_pairs) + _truths(pairs.test, pairs.test_pairs)
        digest.update(str([*pairs.maps]).encode())
        for array in [*truths, *pairs.between.values(), *pairs.maps.values()]:
            digest.update(f"{array.shape}".encode() + array.tobytes())
        return digest.digest()

    def basis_dtype(self, options: TrainOptions, device: torch.device) -> torch.dtype:
        """Functional maps need full precision."""
        return torch.float32

    def scored(
        self, data: PairedMeshes, predictions: Sequence[Tensor], samples: Sequence[PairSample], **where: Any
    ) -> ScoredPairs:
        return score_pairs(data.pairs, predictions, samples, **where)


def _trained_pairs(options: TrainOptions) -> int:
    """The pairs of all epochs together, by default."""
    if options.partial:
        return PARTIAL_PAIRS
    is_adaptation = options.method == "unsupervised" and options.start is not None
    return ADAPTED_PAIRS if is_adaptation else TRAINED_PAIRS[options.method]


def _truths(shapes: Sequence[PairShape], pairs: Sequence[Pair]) -> list[NDArray[Any]]:
    """The template points of each mesh, and then the second meshes of its pairs."""
    partners: list[list[int]] = [[] for _ in shapes]
    for i, j in pairs:
        partners[i].append(j)
    truths = []
    for shape, numbers in zip(shapes, partners, strict=True):
        template = () if shape.template is None else (shape.template,)
        truths.append(np.concatenate([*template, np.array(numbers, np.int64)]))
    return truths


TASK = Correspondence()
