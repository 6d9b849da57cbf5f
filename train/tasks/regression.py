"""Regression: numbers for each vertex, face, edge or mesh.

Networks are trained on standardized targets. Everything that people read is in the units of the targets.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from diffnet.data import LabeledMeshes, LabelsAt, TargetsAt, feature_parts, index_targets
from diffnet.data.feature_names import component_names, is_in_files, target_parts, vector_columns, vector_targets
from diffnet.data.folders.files import listing
from diffnet.data.places import columns_at, places_of, rows_at
from diffnet.data.stored import StoredMeshes, names_of, vertex_counts_of
from diffnet.geometry import element_areas
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text, csv_text, full_number, npy_bytes, write_atomically
from diffnet.geometry.mesh.attributes import properties_of
from diffnet.geometry.mesh.cortex import values_bytes
from diffnet.geometry.mesh.mesh import mesh_suffix
from diffnet.train.metrics import (
    column_scores,
    mean_r2,
    mean_score,
    number,
    number_or_none,
    relative_l2,
    score_columns,
    scores_a_test,
    vector_scores,
)
from diffnet.train.options import TrainOptions
from diffnet.train.options.regression import Loss
from diffnet.train.options.shared import weight_entries
from diffnet.train.options.sides import found_sides
from diffnet.train.options.task_options import SetOptions
from diffnet.train.tasks.classes import numbers_on
from diffnet.train.tasks.task import Fields, MeshTask, NetworkInput, Predicted, ReportParts, Scored, write_vtp

MAX_SCATTERED = 1_000_000  # rows that charts choose their points from

_ERRORS: dict[Loss, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}
# Ends of columns of per_mesh.csv.
_OF_MESHES, _OF_FIELDS, _OF_VECTORS = ("", "_predicted"), ("_mae", "_rmse", "_relative_l2"), ("_relative_l2", "_angle")


def _tally(predictions: Tensor, targets: Tensor) -> Tensor:
    """For each column: the number of targets, their sum, their sum of squares, and sums of the errors."""
    mask = ~targets.isnan()
    truth = targets.double().nan_to_num()
    errors = torch.where(mask, predictions.double() - truth, 0)
    parts = (mask.double(), truth, truth**2, errors.abs(), errors**2)
    return torch.stack([part.sum(0) for part in parts], 1)


def _truths(scored: Scored) -> Iterator[Tensor]:
    """The targets (N, C) float64 of each mesh, which are read one after another."""
    return (torch.as_tensor(truth, dtype=torch.float64) for _, truth in scored.cases())


def _errors(scored: Scored) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The errors of each mesh: those of its C columns (M, 3, C), and the `vector_scores` of its P vectors (M, 2, P).

    Those of a column are the mean absolute error, the root of the mean squared one and the `relative_l2`, which targets
    of whole meshes don't have. NaN where not defined. Meshes are read one after another, once.
    """
    if "errors" not in scored.memo:
        at, rows, vectors = scored.labels_at, [], []
        for (item, labels), predicted in zip(scored.cases(), scored.predictions, strict=True):
            mesh, truth = item.mesh, torch.as_tensor(labels, dtype=torch.float64)
            errors = predicted.double() - truth
            areas = np.ones(len(truth))
            for place, part in rows_at(areas, len(mesh.verts), at):
                if not (place == "meshes" or mesh.is_point_cloud or scored.options.equal_weights):
                    part[:] = element_areas(mesh, place, per_polygon=mesh.has_polygons)
            relative = np.where(scored.of_meshes, np.nan, relative_l2(predicted.numpy(), labels, areas))
            rows.append([errors.abs().nanmean(0).numpy(), errors.square().nanmean(0).sqrt().numpy(), relative])
            parts = [slice(3 * i, 3 * i + 3) for i in range(scored.options.vectors)]
            vectors.append([vector_scores(predicted[:, part].numpy(), labels[:, part], areas) for part in parts])
        of_columns = np.array(rows).reshape(len(rows), 3, len(scored.label_names))
        of_vectors = np.array(vectors).reshape(len(rows), scored.options.vectors, 2).transpose(0, 2, 1)
        scored.memo["errors"] = of_columns, of_vectors
    return scored.memo["errors"]  # type: ignore[no-any-return]


def _scattered(scored: Scored) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The predictions and the targets (N, C) to draw: all of them, or MAX_SCATTERED rows from all meshes."""
    total = sum(len(prediction) for prediction in scored.predictions)
    picks = np.arange(total)
    if total > MAX_SCATTERED:
        picks = np.sort(np.random.default_rng(0).choice(total, MAX_SCATTERED, replace=False))
        if isinstance(scored.labels_at, tuple) and "meshes" in scored.labels_at:  # they are few among the rows
            picks = np.union1d(picks, np.cumsum([len(prediction) for prediction in scored.predictions]) - 1)
    rows: list[NDArray[np.float64]] = []
    first = 0
    for prediction, truth in zip(scored.predictions, _truths(scored), strict=True):
        part = picks[np.searchsorted(picks, first) : np.searchsorted(picks, first + len(truth))] - first
        rows.append(np.stack([prediction.numpy()[part], truth.numpy()[part]]))
        first += len(truth)
    predicted, true = np.concatenate(rows, axis=1)
    return predicted, true


def _balance(data: LabeledMeshes) -> list[float]:
    """Weights of the columns, with which those at several places count alike. They are 1 for one place."""
    if isinstance(data.labels_at, str):
        return [1.0] * len(data.label_names)
    meshes = data.train
    faces = meshes.face_counts if isinstance(meshes, StoredMeshes) else [len(item.mesh.faces) for item in meshes]
    totals = {"vertices": int(vertex_counts_of(meshes).sum()), "faces": int(sum(faces)), "meshes": len(meshes)}
    counts = [totals[place] for place in data.labels_at]
    return [sum(counts) / len(counts) / count for count in counts]


def _joined(
    names: Sequence[str], values: NDArray[np.float64], targets: Collection[str] = ()
) -> dict[str, NDArray[np.float64]]:
    """Columns as arrays. Those that `read_targets` makes of one array, NAME_0, NAME_1, …, are one array (N, C) again.

    targets: the names of arrays that were read, if they are known

    >>> {name: x.shape for name, x in _joined(["u_0", "u_1", "p"], np.zeros((5, 3))).items()}
    {'u': (5, 2), 'p': (5,)}
    >>> [*_joined(["u_0", "u_1"], np.zeros((5, 2)), ["u_0", "u_1"])]
    ['u_0', 'u_1']
    """
    arrays = dict[str, NDArray[np.float64]]()
    for stem, group in groupby(names, lambda name: name if name in targets else name.rpartition("_")[0]):
        columns = [names.index(name) for name in group]
        is_array = [names[i] for i in columns] == [f"{stem}_{k}" for k in range(len(columns))]
        if len(columns) > 1 and is_array and (stem in targets or not targets):
            arrays[stem] = values[:, columns]
        else:
            arrays |= {names[i]: values[:, i] for i in columns}
    return arrays


class Regression(MeshTask):
    """Numbers for each element of a mesh, or for each mesh."""

    name = "regression"
    heading = "Predicted values"
    targets_at = ("vertices", "faces", "edges", "meshes")
    report_files = ("scatter.png",)
    standardized = True
    no_classes = "the network predicts numbers and not classes; call predict_values"

    def prepared(self, data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
        """Weights of targets become one for each column. Raises OptionError for a name that is none of the targets.

        Columns at several places count alike, although there are fewer meshes than faces.
        """
        data, options = super().prepared(data, options)
        if options.target_weights is None and not isinstance(data.labels_at, tuple):
            return data, options
        names, vectors = data.label_names, options.vector_names
        entries = [] if options.target_weights is None else weight_entries("target_weights", options.target_weights)
        weights = _balance(data)
        if entries and entries[0][0] is None:  # of a stored run
            if len(entries) != len(names):
                raise OptionError(f"target_weights has {len(entries)} weights for {len(names)} columns")
            return data, options
        for name, weight in entries:
            columns = component_names(str(name)) if name in vectors else [str(name)]
            if not set(columns) <= set(names):
                raise OptionError(f"target_weights names {name!r}, and the targets are {listing([*vectors, *names])}")
            for column in columns:
                weights[names.index(column)] *= weight
        return data, replace(options, target_weights=",".join(f"{weight:.8g}" for weight in weights))

    def check(self, data: LabeledMeshes, options: TrainOptions) -> None:
        """Raises OptionError for targets that should turn with the mesh, or change sides with it, and don't.

        Warns if they are a vector and the features don't depend on the orientation.
        """
        parts, count = vector_targets(options.targets), 3 * options.vectors
        expected = [name for vector in options.vector_names for name in component_names(vector)]
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
        at = data.labels_at
        places = zip([at] * len(data.label_names) if isinstance(at, str) else at, data.label_names, strict=True)
        each = [(place, [name for _, name in group]) for place, group in groupby(places, lambda pair: pair[0])]
        return [("targets", ", ".join(f"{listing(names)} of the {place}" for place, names in each))]

    def loss(self, outputs: Tensor, targets: Tensor, options: TrainOptions) -> Tensor:
        """The mean error () over the targets that are not NaN, as the option `loss` says. 0 if there are none.

        Errors are multiplied by the weights of the targets.
        """
        mask = ~targets.isnan()
        errors = _ERRORS[options.loss](outputs.float(), targets.float().nan_to_num(), reduction="none")
        if options.target_weights is not None:
            errors = errors * numbers_on(errors.device, options.target_weights)
        return torch.where(mask, errors, 0).sum() / mask.sum().clamp(min=1)

    def loss_weight(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        return lambda targets: (~targets.isnan()).sum()

    def score(self, tally: Tensor, options: TrainOptions) -> float:
        return mean_r2(tally)

    def score_name(self, options: TrainOptions) -> str:
        return "r2"

    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> LabeledMeshes:
        return index_targets(data[0], how.cache, how.targets, **how.for_index())

    def predict(self, outputs: Tensor) -> Tensor:
        """Standardized predictions (N, C) float32."""
        return outputs.float()

    def new_tally(self, channels: int, device: torch.device, options: TrainOptions) -> Tensor:
        return torch.zeros(channels, 5, dtype=torch.float64, device=device)

    def tally(self, predictions: Tensor, targets: Tensor, channels: int, options: TrainOptions) -> Tensor:
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
            {"name": name, **{key: number_or_none(value) for key, value in entry.items()}}
            for name, entry in zip(scored.label_names, scores, strict=True)
        ]
        for row, column, of_meshes in zip(rows, _errors(scored)[0][:, 2].T, scored.of_meshes, strict=True):
            if not of_meshes:
                row["relative_l2"] = number_or_none(mean_score(column))
        fields, vectors = [], scored.options.vector_names
        for name, (relative, angles) in zip(vectors, _errors(scored)[1].transpose(2, 1, 0), strict=True):
            first = scored.label_names.index(component_names(name)[0])
            count = sum(int((~x[:, first : first + 3].isnan().any(1)).sum()) for x in _truths(scored))
            means = (number_or_none(mean_score(column)) for column in (relative, angles))
            fields.append(dict(zip(("name", "count", "relative_l2", "angle"), (name, count, *means), strict=True)))
        more = {"vectors": fields} if fields else {}
        mean = number_or_none(mean_r2(tally))
        return {"test_r2": mean, "labels_at": scored.labels_at, "columns": rows, **more}

    def per_mesh(self, scored: Scored, results: dict[str, Any]) -> list[list[Any]]:
        """The errors of each column, or the target and the prediction of whole meshes."""
        ends = [_OF_MESHES if of_meshes else _OF_FIELDS for of_meshes in scored.of_meshes]
        header = [f"{name}{end}" for name, each in zip(scored.label_names, ends, strict=True) for end in each]
        header += [f"{name}{end}" for name in scored.options.vector_names for end in _OF_VECTORS]
        rows: list[list[Any]] = [["mesh", *header]]
        truths = _truths(scored) if any(scored.of_meshes) else repeat(torch.zeros(1, len(ends)))
        cases = zip(names_of(scored.meshes), scored.predictions, *_errors(scored), truths, strict=False)
        for name, predicted, errors, vectors, truth in cases:
            whole = np.stack([truth[-1].numpy(), predicted[-1].numpy()])
            columns = [(whole if end is _OF_MESHES else errors)[:, i] for i, end in enumerate(ends)]
            numbers = np.concatenate([*columns, *vectors.T]).tolist()
            rows.append([as_text(name), *("" if math.isnan(x) else f"{x:.12g}" for x in numbers)])
        return rows

    def worst_first(self, scored: Scored) -> list[int]:
        """The meshes by their errors in units of those of all meshes, the worst first."""
        errors = _errors(scored)[0][:, 1]
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
            table.add_row(f"… {len(entries) - 30} more in results.json")
        return table, f"{'test ' if scores_a_test(results) else ''}R² {number(results['test_r2'])}"

    def write_report(self, scored: Scored, results: dict[str, Any], parts: ReportParts) -> None:
        # Matplotlib takes half a second to import, and training starts without it.
        from diffnet.train.report.regression import column_table, scatter_png, values_html

        names, scatter = scored.label_names, scatter_png(*_scattered(scored), scored.label_names)
        write_atomically(parts.out / "scatter.png", scatter)
        captions = "Predictions against the truth", "Training"
        charts = zip((scatter, parts.curves), captions, captions, strict=True)
        score = {"R²" if len(names) == 1 else "Mean R²": number(results["test_r2"])}
        parts = parts._replace(summary={**score, **parts.summary})
        section = partial(values_html, names=names, at=scored.labels_at)
        self.write_page(scored, results, parts, "Regression on the", column_table(results), charts, section)

    def formats(self, at: TargetsAt) -> tuple[str, ...]:
        if at == "meshes" or isinstance(at, tuple):
            return () if at == "meshes" else (".vtp",)  # one table, or the only files with arrays at all places
        formats = (".csv", ".npy") if at == "edges" else (".ply", ".vtp", ".npy", ".csv")  # meshes have no edges
        return (*formats, ".shape.gii") if at == "vertices" else formats

    def write_file(self, file: Path, predicted: Predicted, network: NetworkInput) -> None:
        """The columns with their names."""
        from diffnet.viz.palette import make_scale
        from diffnet.viz.ply import ply_names, write_ply

        names, values, at = network.label_names, predicted.values.numpy(), network.labels_at
        if mesh_suffix(file) == ".shape.gii":
            write_atomically(file, values_bytes(mesh_suffix(file), values))
        elif file.suffix.lower() == ".npy":
            write_atomically(file, npy_bytes(values))
        elif file.suffix.lower() == ".vtp":
            parts = columns_at(values, names, len(predicted.mesh.verts), at)
            targets = network.options.targets or ""
            arrays = [name.rpartition(":")[2] for name in target_parts(targets)] if is_in_files(targets) else []
            write_vtp(file, predicted.mesh, {place: _joined(each, rows, arrays) for place, each, rows in parts})
        elif file.suffix.lower() == ".csv":
            write_atomically(file, csv_text([names, *([full_number(value) for value in row] for row in values)]))
        else:
            colors = make_scale(values[:, 0]).colors(values[:, 0])
            scalars, before = dict(zip(ply_names(names), values.T, strict=True)), properties_of(predicted.mesh)
            write_ply(file, predicted.mesh, scalars=scalars, colors=colors, at=cast(LabelsAt, at), attributes=before)

    def fields(self, predicted: Predicted, network: NetworkInput) -> Fields:
        """Values at vertices and at faces are shown at faces, those of vertices by their means."""
        mesh, at, arrays = predicted.mesh, network.labels_at, dict[str, NDArray[np.float64]]()
        places = [place for place in places_of(at) if place != "meshes"]
        shown: LabelsAt = places[-1] if places else "vertices"
        count = len(mesh.verts if shown == "vertices" else mesh.faces)
        for place, names, values in columns_at(predicted.values.numpy(), network.label_names, len(mesh.verts), at):
            if place == "meshes":
                values = np.repeat(values, count, axis=0)
            elif place != shown:
                values = values[mesh.faces].mean(1)
            arrays |= dict(zip(names, values.T, strict=True))
        return Fields("scalars", shown, {name: arrays[name] for name in network.label_names})


TASK = Regression()
