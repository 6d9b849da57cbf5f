"""Regression: numbers for each vertex, face, edge or mesh.

Networks are trained on standardized targets. Everything that people read is in the units of the targets.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from diffnet.data import LabeledMeshes, TargetsAt, feature_parts, index_targets, with_columns
from diffnet.data.feature_names import component_names, vector_columns, vector_targets
from diffnet.data.folders.files import listing
from diffnet.data.stored import names_of
from diffnet.geometry import element_areas
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text, csv_text, npy_bytes, write_atomically
from diffnet.geometry.mesh.attributes import properties_of
from diffnet.geometry.mesh.cortex import values_bytes
from diffnet.geometry.mesh.mesh import mesh_suffix
from diffnet.train.metrics import (
    column_scores,
    mean_r2,
    number,
    relative_l2,
    score_columns,
    scores_a_test,
    spread_over,
    vector_scores,
)
from diffnet.train.options import TrainOptions
from diffnet.train.options.regression import Loss, target_weight_entries
from diffnet.train.options.sides import found_sides
from diffnet.train.options.task_options import SetOptions
from diffnet.train.tasks.task import Fields, MeshTask, NetworkInput, Predicted, ReportParts, Scored, write_vtp

SHOWN_MESHES = 8  # on the page of predictions, 60 of those with targets for whole meshes
SHOWN_WHOLE = 60
MAX_SCATTERED = 1_000_000  # rows that charts choose their points from

_ERRORS: dict[Loss, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}
_OF_VECTORS = "_relative_l2", "_angle"  # ends of columns of per_mesh.csv


@cache
def _weights_on(device: torch.device, text: str) -> Tensor:
    """The weights (C,) of all columns, on a device. They stay there: a CUDA graph can't copy from the host."""
    return torch.tensor([weight for _, weight in target_weight_entries(text)], dtype=torch.float32, device=device)


def _tally(predictions: Tensor, targets: Tensor) -> Tensor:
    """For each column: the number of targets, their sum, their sum of squares, and sums of the errors."""
    mask = ~targets.isnan()
    truth = targets.double().nan_to_num()
    errors = torch.where(mask, predictions.double() - truth, 0)
    parts = (mask.double(), truth, truth**2, errors.abs(), errors**2)
    return torch.stack([part.sum(0) for part in parts], 1)


def _truths(scored: Scored) -> Iterator[Tensor]:
    """The targets (N, C) float64 of each mesh, which are read one after another."""
    return (torch.as_tensor(truth, dtype=torch.float64) for truth in scored.truths())


def _mesh_errors(scored: Scored) -> NDArray[np.float64]:
    """The mean absolute error, the root of the mean squared one and the `relative_l2` of each mesh, (M, 3, C).

    NaN without targets. Whole meshes have no `relative_l2`. Meshes are read one after another, once.
    """
    return _errors(scored)[0]


def _vector_errors(scored: Scored) -> NDArray[np.float64]:
    """The `vector_scores` of each mesh and each vector among the targets, (M, 2, P). NaN where not defined."""
    return _errors(scored)[1]


def _errors(scored: Scored) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The results of `_mesh_errors` and `_vector_errors`."""
    if "errors" not in scored.memo:
        at, rows, vectors = scored.labels_at, [], []
        for (mesh, labels), predicted in zip(scored.cases(), scored.predictions, strict=True):
            truth = torch.as_tensor(labels, dtype=torch.float64)
            errors = predicted.double() - truth
            relative, areas = np.full(truth.shape[1], np.nan), np.ones(len(truth))
            if at != "meshes":
                if not mesh.is_point_cloud and not scored.equal_weights:
                    areas = element_areas(mesh, at, per_polygon=mesh.has_polygons)
                relative = relative_l2(predicted.numpy(), labels, areas)
            rows.append([errors.abs().nanmean(0).numpy(), errors.square().nanmean(0).sqrt().numpy(), relative])
            parts = [slice(3 * i, 3 * i + 3) for i in range(len(scored.vectors))]
            vectors.append([vector_scores(predicted[:, part].numpy(), labels[:, part], areas) for part in parts])
        of_columns = np.array(rows).reshape(len(rows), 3, len(scored.label_names))
        of_vectors = np.array(vectors).reshape(len(rows), len(scored.vectors), 2).transpose(0, 2, 1)
        scored.memo["errors"] = of_columns, of_vectors
    return scored.memo["errors"]  # type: ignore[no-any-return]


def _scattered(scored: Scored) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The predictions and the targets (N, C) to draw: all of them, or MAX_SCATTERED rows from all meshes."""
    total = sum(len(prediction) for prediction in scored.predictions)
    picks = np.arange(total)
    if total > MAX_SCATTERED:
        picks = np.sort(np.random.default_rng(0).choice(total, MAX_SCATTERED, replace=False))
    rows: list[NDArray[np.float64]] = []
    first = 0
    for prediction, truth in zip(scored.predictions, _truths(scored), strict=True):
        part = picks[np.searchsorted(picks, first) : np.searchsorted(picks, first + len(truth))] - first
        rows.append(np.stack([prediction.numpy()[part], truth.numpy()[part]]))
        first += len(truth)
    predicted, true = np.concatenate(rows, axis=1)
    return predicted, true


def _joined(names: Sequence[str], values: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Columns as arrays. Those that `read_targets` makes of one array, NAME_0, NAME_1, …, are one array (N, C) again.

    >>> {name: x.shape for name, x in _joined(["u_0", "u_1", "p"], np.zeros((5, 3))).items()}
    {'u': (5, 2), 'p': (5,)}
    """
    arrays = dict[str, NDArray[np.float64]]()
    for stem, group in groupby(range(len(names)), lambda i: names[i].rpartition("_")[0]):
        columns = list(group)
        if len(columns) > 1 and [names[i] for i in columns] == [f"{stem}_{k}" for k in range(len(columns))]:
            arrays[stem] = values[:, columns]
        else:
            arrays |= {names[i]: values[:, i] for i in columns}
    return arrays


class Regression(MeshTask):
    """Numbers for each element of a mesh, or for each mesh."""

    name = "regression"
    heading = "Predicted values"
    targets_at = ("vertices", "faces", "edges", "meshes")
    score_name = "r2"
    report_files = ("scatter.png",)
    standardized = True
    no_classes = "the network predicts numbers and not classes; call predict_values"

    def matched(self, data: LabeledMeshes, names: list[str]) -> LabeledMeshes:
        return with_columns(data, names)

    def prepared(self, data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
        """Weights of targets become one for each column. Raises OptionError for a name that is none of the targets."""
        data, options = super().prepared(data, options)
        if options.target_weights is None:
            return data, options
        names, vectors = data.label_names, [part.partition(":")[2] for part in vector_targets(options.targets)]
        entries, weights = target_weight_entries(options.target_weights), [1.0] * len(names)
        if not entries[0][0]:  # of a stored run
            if len(entries) != len(names):
                raise OptionError(f"target_weights has {len(entries)} weights for {len(names)} columns")
            return data, options
        for name, weight in entries:
            columns = component_names(name) if name in vectors else [name]
            if not set(columns) <= set(names):
                raise OptionError(f"target_weights names {name!r}, and the targets are {listing([*vectors, *names])}")
            for column in columns:
                weights[names.index(column)] = weight
        return data, replace(options, target_weights=",".join(f"{weight:.8g}" for weight in weights))

    def check(self, data: LabeledMeshes, options: TrainOptions) -> None:
        """Raises OptionError for targets that should turn with the mesh, or change sides with it, and don't.

        Warns if they are a vector and the features don't depend on the orientation.
        """
        parts, count = vector_targets(options.targets), 3 * options.vectors
        expected = [name for part in parts for name in component_names(part.partition(":")[2])]
        if data.label_names[:count] != expected:
            columns = listing(data.label_names)
            raise OptionError(f"{'+'.join(parts)} should be the first columns of the targets, which are {columns}")
        if options.scalar_targets:
            return
        others = data.label_names[count:]
        vectors, sides = vector_columns(others), found_sides(others)
        knows = any(part.is_vector or part.array is not None for part in feature_parts(options.features))
        features = f"the features {options.features} don't depend on its orientation"
        scalars = (
            "If they are a vector in files of the meshes, write --targets vector:NAME. If they are numbers that stay "
            "as they are when a mesh is turned or mirrored, add --scalar-targets"
        )
        if parts and options.vector_head == "space" and not knows:
            raise OptionError(f"{parts[0]} turns with the mesh, but {features}. Leave out --vector-head space")
        if vectors:
            columns = f"the columns {', '.join(vectors[0])} look like a vector, which turns with the mesh"
            if options.mirror:
                raise OptionError(f"{columns}, but --mirror leaves their values as they are; leave it out. {scalars}")
            if options.rotate is not False:
                why = "random rotations in training leave their values as they are" if options.rotates else features
                more = "" if knows else "--features xyz+normals+log-hks "
                raise OptionError(f"{columns}, but {why}. If all meshes stand alike, add {more}--no-rotate. {scalars}")
            if not knows:
                warnings.warn(f"{columns}, but {features}. Add --features xyz+normals+log-hks", stacklevel=3)
        if options.mirror and sides:
            raise OptionError(
                f"the columns {sides[0][0]} and {sides[0][1]} look like two sides, but --mirror leaves their values as "
                f"they are; leave it out. {scalars}"
            )

    def described(self, data: LabeledMeshes, jobs: int | None) -> list[tuple[str, str]]:
        conditions = [("conditions", listing(data.condition_names))] if data.condition_names else []
        return [("targets", f"{listing(data.label_names)} of the {data.labels_at}"), *conditions]

    def loss(self, outputs: Tensor, targets: Tensor, options: TrainOptions) -> Tensor:
        """The mean error () over the targets that are not NaN, as the option `loss` says. 0 if there are none.

        Errors are multiplied by the weights of the targets.
        """
        mask = ~targets.isnan()
        errors = _ERRORS[options.loss](outputs.float(), targets.float().nan_to_num(), reduction="none")
        if options.target_weights is not None:
            errors = errors * _weights_on(errors.device, options.target_weights)
        return torch.where(mask, errors, 0).sum() / mask.sum().clamp(min=1)

    def loss_weight(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        return lambda targets: (~targets.isnan()).sum()

    def score(self, tally: Tensor) -> float:
        return mean_r2(tally)

    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> LabeledMeshes:
        return index_targets(data[0], how.cache, how.targets, conditions=how.conditions, **how.for_index())

    def scored(
        self, data: LabeledMeshes, predictions: Sequence[Tensor], samples: Sequence[Any], **where: Any
    ) -> Scored:
        options: TrainOptions = where["options"]
        names = tuple(part.partition(":")[2] for part in vector_targets(options.targets))
        scored = super().scored(data, predictions, samples, **where)
        return replace(scored, vectors=names, equal_weights=options.equal_weights)

    def predict(self, outputs: Tensor) -> Tensor:
        """Standardized predictions (N, C) float32."""
        return outputs.float()

    def new_tally(self, channels: int, device: torch.device) -> Tensor:
        return torch.zeros(channels, 5, dtype=torch.float64, device=device)

    def tally(self, predictions: Tensor, targets: Tensor, channels: int) -> Tensor:
        return _tally(predictions, targets)

    def results(self, scored: Scored) -> dict[str, Any]:
        columns = len(scored.label_names)
        # Sums of numbers far from 0 lose their differences, so the smallest target of each column is the origin.
        origin = torch.stack([values.nan_to_num(nan=math.inf).amin(0) for values in _truths(scored)]).amin(0)
        tally = torch.zeros(columns, 5, dtype=torch.float64)
        for values, prediction in zip(_truths(scored), scored.predictions, strict=True):
            tally += _tally(prediction - origin, values - origin)
        scores = column_scores(tally)
        rows = [
            {"name": name, **{key: None if np.isnan(value) else value for key, value in entry.items()}}
            for name, entry in zip(scored.label_names, scores, strict=True)
        ]
        if scored.labels_at != "meshes":
            for row, column in zip(rows, _mesh_errors(scored)[:, 2].T, strict=True):
                row["relative_l2"] = None if np.isnan(column).all() else float(np.nanmean(column))
        fields = []
        for name, (relative, angles) in zip(scored.vectors, _vector_errors(scored).transpose(2, 1, 0), strict=True):
            count = next(row["count"] for row in rows if row["name"] == component_names(name)[0])
            means = (None if np.isnan(column).all() else float(np.nanmean(column)) for column in (relative, angles))
            fields.append(dict(zip(("name", "count", "relative_l2", "angle"), (name, count, *means), strict=True)))
        more = {"vectors": fields} if fields else {}
        mean = mean_r2(tally)
        return {"test_r2": None if np.isnan(mean) else mean, "labels_at": scored.labels_at, "columns": rows, **more}

    def per_mesh(self, scored: Scored, results: dict[str, Any]) -> list[list[Any]]:
        """The errors of each column, or the target and the prediction of whole meshes."""
        whole = scored.labels_at == "meshes"
        ends = ("", "_predicted") if whole else ("_mae", "_rmse", "_relative_l2")
        header = [f"{name}{end}" for name in scored.label_names for end in ends]
        rows: list[list[Any]] = [["mesh", *header, *(f"{v}{end}" for v in scored.vectors for end in _OF_VECTORS)]]
        more = _vector_errors(scored)
        pairs = ((truth[0], each[0]) for truth, each in zip(_truths(scored), scored.predictions, strict=True))
        of_meshes = pairs if whole else _mesh_errors(scored)
        for name, values, vectors in zip(names_of(scored.meshes), of_meshes, more, strict=True):
            numbers = [float(value) for part in (values, vectors) for each in zip(*part, strict=True) for value in each]
            rows.append([as_text(name), *("" if math.isnan(x) else f"{x:.6g}" for x in numbers)])
        return rows

    def worst_first(self, scored: Scored) -> list[int]:
        """The meshes by their errors in units of those of all meshes, the worst first."""
        errors = _mesh_errors(scored)[:, 1]
        sizes = np.nan_to_num(errors / np.maximum(np.sqrt(np.nanmean(errors**2, axis=0)), 1e-300)).mean(1)
        return np.argsort(-sizes, kind="stable").tolist()

    def summary(self, results: dict[str, Any]) -> tuple[Table, str]:
        entries = [*results.get("vectors", ()), *results["columns"]]
        scores = score_columns(entries)
        table = Table("column", "targets", *scores.values())
        for column in table.columns[1:]:
            column.justify = "right"
        for row in entries[:30]:
            table.add_row(row["name"], str(row["count"]), *(number(row.get(key)) for key in scores))
        if len(entries) > 30:
            table.add_row(f"… {len(entries) - 30} more in results.json", "", *("" for _ in scores))
        return table, f"{'test ' if scores_a_test(results) else ''}R² {number(results['test_r2'])}"

    def write_report(self, scored: Scored, results: dict[str, Any], parts: ReportParts) -> None:
        # Matplotlib takes half a second to import, and training starts without it.
        from diffnet.train.report.regression import scatter_png, write_values_report

        scatter = scatter_png(*_scattered(scored), scored.label_names)
        write_atomically(parts.out / "scatter.png", scatter)
        order = self.worst_first(scored)
        shown = spread_over(order, SHOWN_WHOLE if scored.labels_at == "meshes" else SHOWN_MESHES)

        write_values_report(
            parts.out / "predictions.html",
            self.reported(scored, shown),
            {"R²" if len(results["columns"]) == 1 else "Mean R²": number(results["test_r2"]), **parts.summary},
            columns=results["columns"],
            vectors=results.get("vectors", ()),
            meshes=[parts.rows[0], *(parts.rows[1 + i] for i in order)],
            at=scored.labels_at,
            scatter=scatter,
            curves=parts.curves,
            title=f"Regression on the {'test' if scores_a_test(results) else 'scored'} meshes",
        )

    def formats(self, at: TargetsAt) -> tuple[str, ...]:
        if at == "meshes":
            return ()  # one table
        formats = (".csv", ".npy") if at == "edges" else (".ply", ".vtp", ".npy", ".csv")  # meshes have no edges
        return (*formats, ".shape.gii") if at == "vertices" else formats

    def write_file(self, file: Path, predicted: Predicted, network: NetworkInput) -> None:
        """The columns with their names."""
        from diffnet.viz.palette import make_scale
        from diffnet.viz.ply import ply_names, write_ply

        names, values, at = network.label_names, predicted.values.numpy(), network.labels_at
        assert at != "meshes"  # these are in a table
        if mesh_suffix(file) == ".shape.gii":
            write_atomically(file, values_bytes(mesh_suffix(file), values))
        elif file.suffix.lower() == ".npy":
            write_atomically(file, npy_bytes(values))
        elif file.suffix.lower() == ".vtp":
            assert at != "edges"
            write_vtp(file, predicted.mesh, at, _joined(names, values))
        elif file.suffix.lower() == ".csv":
            write_atomically(file, csv_text([names, *([f"{value:.9g}" for value in row] for row in values)]))
        else:
            colors = make_scale(values[:, 0]).colors(values[:, 0])
            scalars, before = dict(zip(ply_names(names), values.T, strict=True)), properties_of(predicted.mesh)
            write_ply(file, predicted.mesh, scalars=scalars, colors=colors, at=at, attributes=before)

    def fields(self, predicted: Predicted, network: NetworkInput) -> Fields:
        values, at = predicted.values.numpy(), network.labels_at
        if at == "meshes":
            values, at = np.repeat(values, len(predicted.mesh.verts), axis=0), "vertices"
        return Fields("scalars", at, dict(zip(network.label_names, values.T, strict=True)))


TASK = Regression()
